"""A request that blocks the worker's loop is named; no request is blamed for another one or for a
slow machine.
"""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

from serve_app.observability.metrics import Telemetry
from tests.tables import each
from workers.attempt import current
from workers.loop_watch import LoopWatch

HELD_S = 0.3
MINE, OTHER = "req_mine", "req_other"


async def test_no_request_is_blamed_for_waiting() -> None:
    current.set(SimpleNamespace(request_id=MINE))  # type: ignore[arg-type]
    watch = LoopWatch(HELD_S)
    watch.start()
    try:
        with watch.watched(MINE) as mine:
            time.sleep(3 * HELD_S)  # noqa: ASYNC251
            await asyncio.wait({mine}, timeout=0.05)
            assert not mine.done()
    finally:
        watch.stop()


class Looks:
    """In place of the watch's pauses and of its clock: what it sees each time that it looks."""

    def __init__(self, watch: LoopWatch, seen: list[tuple[float | None, float]]) -> None:
        self._watch, self.seen = watch, seen
        watch._stopped, watch._computed_s = self, self.computed_s  # type: ignore[assignment, method-assign]

    def computed_s(self) -> float | None:
        cpu_s, self._watch._beat_cpu_s = self.seen.pop(0)
        return cpu_s

    def wait(self, _: float) -> bool:
        return not self.seen

    def is_set(self) -> bool:
        return False


@each(
    "held, seen",
    [
        (1, [(0.0, 0.0), (0.1, 0.0), (0.4, 0.0)]),
        (1, [(0.0, 0.0), (0.4, 0.0), (0.9, 0.0)]),  # told once
        (2, [(0.0, 0.0), (0.4, 0.0), (0.8, 0.5), (0.9, 0.5)]),  # two steps
        (0, [(0.0, 0.0), (0.1, 0.0), (0.2, 0.0)]),
        (0, [(0.0, 0.0), (0.2, 0.0), (0.4, 0.3), (0.5, 0.3)]),  # the loop turned between
        (0, [(0.0, 0.0), (0.2, 0.0), (None, 0.0), (0.2, 0.0)]),  # a garbage collection
        (0, [(5.0, 0.0), (5.2, 0.0)]),  # what was computed before the first look is nobody's
    ],
)
async def test_one_step_of_one_turn_may_compute_for_so_long(
    held: int, seen: list[tuple[float | None, float]]
) -> None:
    """CPU seconds of the loop's thread at each look, and those at the loop's last turn."""
    telemetry = Telemetry()
    current.set(SimpleNamespace(request_id=MINE))  # type: ignore[arg-type]
    watch = LoopWatch(HELD_S, telemetry)
    watch._loop, watch._loop_thread = asyncio.get_running_loop(), threading.get_ident()
    Looks(watch, [*seen])
    with watch.watched(MINE) as mine, watch.watched(OTHER) as other:
        watch._watch()
        await asyncio.sleep(0)
        assert [mine.done(), other.done()] == [held > 0, False]
    assert telemetry.registry.get_sample_value("hermes_event_loop_blocks_total") == held


@each(
    "is_named, seen",
    [
        (False, [MINE]),  # what was done before the only look is not known
        (True, [MINE, MINE]),
        (True, [f"cmpl-{MINE}-0", f"cmpl-{MINE}-1"]),
        (False, [OTHER, MINE]),
        (False, ["", MINE]),
        (False, [f"{MINE} {OTHER}", f"{MINE} {OTHER}"]),
    ],
)
async def test_a_task_of_all_requests_names_one_only_if_every_look_at_its_step_does(
    is_named: bool, seen: list[str]
) -> None:
    current.set(None)
    watch = LoopWatch(HELD_S)
    watch._loop, watch._loop_thread = asyncio.get_running_loop(), threading.get_ident()
    cpu_s = [0.0, *(1.1 * HELD_S * number / len(seen) for number in range(len(seen) + 1))]
    looks = Looks(watch, [(each_s, 0.0) for each_s in cpu_s])

    def work() -> None:
        works_on = ""

        def wait(_: float) -> bool:
            nonlocal works_on
            works_on = ["", *seen, ""][-1 - len(looks.seen)]
            return not looks.seen

        looks.wait = wait  # type: ignore[method-assign]
        watch._watch()

    with watch.watched(MINE) as mine, watch.watched(OTHER) as other:
        work()
        await asyncio.sleep(0)
        assert [mine.done(), other.done()] == [is_named, False]
