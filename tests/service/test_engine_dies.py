"""Failures that concern the engine, on the real one: its core dies, its process dies, a process
hangs.
"""

from __future__ import annotations

import asyncio
import signal

import pytest

from scripts.chaos_testing.parts import Parts
from scripts.chaos_testing.traffic import Told
from tests.service.disturbance import Victims, attempts, real_text, under, whole_again
from tests.service.support import Running

pytestmark = [pytest.mark.disturbs, pytest.mark.timeout(1800)]
TOKENS = 3000
"""What is still being written when a worker has hung for 20 s, or when a client that waits for a
core sees its first event.
"""


@pytest.mark.parametrize(
    "kind",
    [
        "engine",
        pytest.param("engine-worker", marks=pytest.mark.nightly),
        pytest.param("worker", marks=pytest.mark.nightly),  # its core must not survive it
    ],
)
def test_a_stream_outlives(service: Running, kind: str) -> None:
    whole_again(service, 2)
    victims = Victims(service, kind)

    async def strike(_: Parts, told: list[Told]) -> None:
        await victims.kill_busiest(told)

    told = under(service, strike, real_text(service), TOKENS, count=4, at_once=True)
    assert max(attempts(told)) >= 2, "none was with the one that died"


@pytest.mark.outage
@pytest.mark.nightly
def test_a_worker_that_hangs_and_wakes_is_refused_and_its_work_aborted(service: Running) -> None:
    whole_again(service, 2)
    victims = Victims(service)

    async def strike(parts: Parts, told: list[Told]) -> None:
        victim = await victims.busiest(told)
        parts.send(victim, signal.SIGSTOP)
        try:
            await asyncio.sleep(20)
        finally:
            parts.send(victim, signal.SIGCONT)

    told = under(service, strike, real_text(service), TOKENS, count=4, at_once=True)
    assert max(attempts(told)) >= 2
    service.until_idle()
