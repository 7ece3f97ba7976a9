"""The simulator's engine chooses its steps when vLLM's does."""

from __future__ import annotations

import asyncio

import pytest

from scripts.simulation import virtual_time
from scripts.simulation.engine_model import EngineParameters, Sequence, VirtualEngine
from workers.simulated_engine import Timing


@pytest.mark.parametrize(("ahead", "first_token_s"), [(False, 2.0), (True, 3.0)])
def test_who_comes_during_a_step_waits_for_the_one_that_is_chosen(
    ahead: bool, first_token_s: float
) -> None:
    """Steps take a second; the second sequence comes in the middle of the first step."""
    timing = Timing(step_ms=1_000.0)
    parameters = EngineParameters("test", timing, 100, async_scheduling=ahead)
    seen: list[float] = []

    async def main() -> None:
        engine, now_s = VirtualEngine(parameters), asyncio.get_running_loop().time
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(engine.run(Sequence(10, 9), lambda: None))
            await asyncio.sleep(0.5)
            late = Sequence(10, 9, base=1_000)
            tasks.create_task(engine.run(late, lambda: seen.append(now_s())))

    virtual_time.run(main())
    assert seen == pytest.approx([first_token_s])
