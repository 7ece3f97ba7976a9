"""A machine that stands still for seconds looks like processes that have died, whose leases end,
and like a Redis that says nothing. In these tests both come only of what the test does.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app import timings
from serve_app.clock import RedisClock
from serve_app.cluster import leases
from tests.journal.admitting import StillIngress, admitting
from tests.journal.journal_helpers import PrivateRedis, World, world
from tests.waiting import PATIENCE_S

LEASE_MS, LONG_MS = timings.LEASE_MS, 3_600_000


class _LongLeases:
    """The timings for who renews leases. Who reads them waits no longer before it trusts them. A
    test that sets the length of a lease gets that length.
    """

    def __getattr__(self, name: str) -> Any:
        value = getattr(timings, name)
        return LONG_MS if (name, value) == ("LEASE_MS", LEASE_MS) else value


@pytest.fixture(autouse=True)
def long_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leases of ingresses and workers, and of who leads batches."""
    monkeypatch.setattr(leases, "timings", _LongLeases())
    monkeypatch.setattr(timings, "BATCH_LEASE_MS", LONG_MS)


@pytest.fixture(autouse=True)
def patient_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of what Redis takes and answers."""
    for name in ("REDIS_CHECK_ANSWER_S", "REDIS_SIZE_ANSWER_S", "REDIS_ANSWER_COUNTS_S"):
        monkeypatch.setattr(timings, name, PATIENCE_S)


@pytest.fixture
def logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """Lines of the service, each once, whether a test before this one has begun its log or not."""
    logger = logging.getLogger("hermes")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    return caplog


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Turns Redis's clock ahead by so many seconds for every process in this test."""
    now_s = RedisClock.now_s

    def turn(by_s: float) -> None:
        monkeypatch.setattr(RedisClock, "now_s", lambda clock: now_s(clock) + by_s)

    return turn


@pytest.fixture
def private_redis(tmp_path: Path) -> Iterator[PrivateRedis]:
    """A Redis that only this test uses, so that it may be killed or filled."""
    redis = PrivateRedis(tmp_path)
    yield redis
    redis.end()


@pytest.fixture
def sections() -> dict[str, Any]:
    """What a module's `World` has in its settings."""
    return {}


@pytest.fixture
async def w(redis_url: str, namespace: str, sections: dict[str, Any]) -> AsyncIterator[World]:
    """A `World` of this test's."""
    async with world(redis_url, namespace, **sections) as made:
        yield made


@pytest.fixture
async def its(w: World) -> AsyncIterator[StillIngress]:
    """An ingress that admits."""
    async with admitting(w.settings) as made:
        yield made
