"""What dies and concerns the engine, on the real one: its core, its process, a process that hangs."""

from __future__ import annotations

import asyncio
import signal

import pytest

from scripts.disorder.parts import Parts
from scripts.disorder.traffic import Told
from tests.service.disturbance import attempts, busiest, real_text, under, whole_again
from tests.service.support import Running

pytestmark = [pytest.mark.disturbs, pytest.mark.timeout(900)]
TOKENS = 1200


@pytest.mark.parametrize("kind", ["engine", "engine-worker", "worker"])
def test_a_stream_outlives(service: Running, kind: str) -> None:
    whole_again(service, 2)

    async def strike(parts: Parts, told: list[Told]) -> None:
        parts.kill(await busiest(service, parts, told, kind))

    told = under(service, strike, real_text(service), TOKENS)
    assert max(attempts(told)) >= 2, "none was with the one that died"


def test_a_worker_that_hangs_and_wakes_is_refused_and_its_work_aborted(service: Running) -> None:
    whole_again(service, 2)

    async def strike(parts: Parts, told: list[Told]) -> None:
        victim = await busiest(service, parts, told)
        parts.send(victim, signal.SIGSTOP)
        try:
            await asyncio.sleep(20)
        finally:
            parts.send(victim, signal.SIGCONT)

    told = under(service, strike, real_text(service), 3000)
    assert max(attempts(told)) >= 2
    service.until_idle()
