"""Three Redis and three real Sentinels, configured as on Kubernetes: the primary dies under 16
streams, and what its successor lacks comes back.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scripts.chaos_testing.failover import Case, measure
from scripts.chaos_testing.sentinels import Sentinels
from serve_app.errors import RedisUnavailable
from tests.journal.journal_helpers import World, world
from tests.waiting import eventually


@contextmanager
def paused(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.clock
async def test_a_successor_that_lacks_entries_gets_them_from_the_workers(tmp_path: Path) -> None:
    outcome = await measure(tmp_path, Case(delay_ms=100, min_replicas=1), strikes=1)
    assert (outcome.whole, outcome.streams) == (16, 16)
    (failover,) = outcome.failovers
    assert failover.lacked > 0, "the replicas were late, so there was something to restore"
    assert failover.missing == 0


async def read(w: World) -> list[str]:
    """The journal's ids; none while no primary is known."""
    try:
        return await w.ids()
    except RedisUnavailable:
        return []


async def test_sentinels_that_do_not_answer_are_passed_over(tmp_path: Path, namespace: str) -> None:
    sentinels = Sentinels(tmp_path / "redis", namespace="t*")
    nobody = sentinels.url.replace("@", "@127.0.0.1:1,", 1)
    try:
        with paused(sentinels.first_sentinel):
            async with world(nobody, namespace) as w:
                await w.admit()
                primary = sentinels.primary()
                sentinels.kill(primary)
                await asyncio.to_thread(sentinels.until_failed_over, primary)
                await eventually(lambda: read(w))
                assert await w.ids() == ["0-1"]
    finally:
        sentinels.stop()
