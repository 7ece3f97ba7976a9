"""Background loops that end are restarted, and reported."""

from __future__ import annotations

import asyncio
import logging

import pytest

from serve_app import timings
from serve_app.errors import HermesError
from serve_app.loops import Loops, backoff, ended, first
from serve_app.observability.metrics import Telemetry
from tests.turned_clock import TurnedClock


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "LOOP_RESTART_S", (0.001,))


async def forever() -> None:
    await asyncio.Event().wait()


def restarts(telemetry: Telemetry, name: str) -> float | None:
    return telemetry.registry.get_sample_value("hermes_loop_restarts_total", {"loop": name})


@pytest.mark.parametrize("ending", [ValueError("no"), None, asyncio.CancelledError()], ids=repr)
async def test_a_loop_that_ends_by_itself_is_started_again_logged_and_counted(
    ending: BaseException | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, logger="hermes.loops"):
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
        async with asyncio.timeout(60):
            await goes_on.wait()
        assert restarts(telemetry, "some-loop") == 1
        assert loops.failing == []
        loops.check_health()
        await loops.end(task)
        assert task.done()
        assert loops.failing == [], "ended on purpose"
    assert "some-loop" in caplog.text


async def test_a_loop_that_does_not_stay_up_makes_its_process_unhealthy_until_it_does() -> None:
    clock = TurnedClock()
    loops = Loops(clock=clock)
    mended, failed_often = asyncio.Event(), asyncio.Event()
    began = 0

    async def work() -> None:
        nonlocal began
        began += 1
        if mended.is_set():
            await forever()
        if began > timings.LOOP_FAILURES:
            failed_often.set()
        raise ValueError("again")

    healthy, task = loops.keep("healthy", forever), loops.keep("broken", work)
    async with asyncio.timeout(60):
        await failed_often.wait()
    assert loops.failing == ["broken"]
    with pytest.raises(HermesError, match="broken"):
        loops.check_health()
    mended.set()
    clock.now_s += timings.LOOP_FAILURES_WITHIN_S - 1
    assert loops.failing == ["broken"]
    clock.now_s += 2
    assert loops.failing == []
    await loops.stop()
    assert healthy.done()
    assert task.done()
    assert loops.failing == [], "ended on purpose"


async def test_a_loop_that_was_cancelled_and_does_not_run_is_known() -> None:
    loops = Loops()
    task = loops.keep("some-loop", forever)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert loops.failing == ["some-loop"]


@pytest.mark.parametrize("what", ["one is done", "one was done", "the limit", "cancelled"])
async def test_the_first_of_several_is_waited_for_and_nothing_is_left_behind(what: str) -> None:
    loop = asyncio.get_running_loop()
    one, other = loop.create_future(), loop.create_future()
    waiting = asyncio.create_task(first(0.0 if what == "the limit" else 1e6, one, other))
    if what == "one was done":
        one.set_result(None)
    await asyncio.sleep(0)
    if what == "one is done":
        other.set_exception(ValueError())
        other.exception()
    elif what == "cancelled":
        waiting.cancel()
    async with asyncio.timeout(60):
        await asyncio.wait({waiting})
    assert waiting.cancelled() == (what == "cancelled")
    assert not one._callbacks  # the future of a sick engine outlives all requests
    assert not other._callbacks


def test_the_pause_after_a_failure_grows_up_to_the_last() -> None:
    pauses_s = (1.0, 10.0, 100.0)
    for failures, longest_s in ((1, 1.5), (2, 15.0), (3, 150.0), (9, 150.0)):
        assert longest_s / 3 <= backoff(pauses_s, failures) <= longest_s


async def test_a_task_to_which_a_cancellation_is_lost_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For example, if the cancellation coincides with a library's own timeout, and the library
    notices only that.
    """
    monkeypatch.setattr(timings, "LOOP_CANCEL_AGAIN_S", 0.01)

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
    async with asyncio.timeout(60):
        await ended([task])
    assert asked == 3
