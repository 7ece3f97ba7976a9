"""Background loops that end by themselves are started again, and known."""

from __future__ import annotations

import asyncio
import logging

import pytest

from serve_app import loops as module
from serve_app.loops import FAILURES, LoopFailed, Loops, ended, jittered
from serve_app.telemetry import Telemetry


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", (0.001,))


async def forever() -> None:
    await asyncio.Event().wait()


def restarts(telemetry: Telemetry, name: str) -> float | None:
    return telemetry.registry.get_sample_value("hermes_loop_restarts_total", {"loop": name})


@pytest.mark.parametrize("ending", [ValueError("no"), None, asyncio.CancelledError()], ids=repr)
def test_a_loop_that_ends_by_itself_is_started_again_logged_and_counted(
    ending: BaseException | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        telemetry = Telemetry()
        loops = Loops(telemetry)
        goes_on = asyncio.Event()
        began = 0

        async def work() -> None:
            nonlocal began
            began += 1
            if began == 2:
                goes_on.set()
                await forever()
            elif ending is not None:
                raise ending

        task = loops.keep("some-loop", work)
        assert restarts(telemetry, "some-loop") == 0
        async with asyncio.timeout(10):
            await goes_on.wait()
        assert restarts(telemetry, "some-loop") == 1
        assert loops.failing == []
        loops.check_health()
        await loops.end(task)
        assert task.done()
        assert loops.failing == [], "ended on purpose"

    with caplog.at_level(logging.ERROR, logger="hermes.loops"):
        asyncio.run(main())
    assert "some-loop" in caplog.text


def test_a_loop_that_does_not_stay_up_makes_its_process_unhealthy_until_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        loops = Loops()
        mended, failed_often = asyncio.Event(), asyncio.Event()
        began = 0

        async def work() -> None:
            nonlocal began
            began += 1
            if mended.is_set():
                await forever()
            if began > FAILURES:
                failed_often.set()
            raise ValueError("again")

        healthy, task = loops.keep("healthy", forever), loops.keep("broken", work)
        async with asyncio.timeout(10):
            await failed_often.wait()
        assert loops.failing == ["broken"]
        with pytest.raises(LoopFailed, match="broken"):
            loops.check_health()
        mended.set()
        monkeypatch.setattr(module, "WITHIN_S", 0.0)  # a minute later
        assert loops.failing == []
        await loops.end(healthy, task)

    asyncio.run(main())


def test_a_loop_that_was_cancelled_and_does_not_run_is_known() -> None:
    async def main() -> None:
        loops = Loops()
        task = loops.keep("some-loop", forever)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert loops.failing == ["some-loop"]

    asyncio.run(main())


def test_who_failed_together_does_not_come_back_together() -> None:
    waits = {jittered(2.0) for _ in range(100)}
    assert len(waits) > 90
    assert min(waits) >= 1.0
    assert max(waits) <= 3.0


def test_a_task_to_which_a_cancellation_is_lost_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it meets a library's own time limit, which is then all that the library sees."""
    monkeypatch.setattr(module, "_ASK_AGAIN_S", 0.01)

    async def main() -> None:
        asked = 0

        async def deaf() -> None:
            nonlocal asked
            while asked < 3:
                try:
                    await forever()
                except asyncio.CancelledError:
                    asked += 1

        task = asyncio.create_task(deaf())
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await ended([task])
        assert asked == 3

    asyncio.run(main())
