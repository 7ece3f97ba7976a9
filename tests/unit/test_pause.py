"""How long an engine keeps outputs, in virtual time."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from scripts.benchmark.lateness import lateness
from scripts.simulation import virtual_time
from serve_app import timings
from serve_app.journal.attempt_log import Pause
from tests.tables import each

LONGEST_S = 0.05


@pytest.mark.parametrize(
    ("streams", "step_ms", "tokens", "wait_ms"),
    [
        (8, 10, 1, 1),
        (32, 10, 5, 42),
        (64, 25, 2, 28),
        (256, 25, 2, 34),
        (64, 46, 1, 3),
    ],
)
def test_what_a_worker_writes_and_what_a_reader_waits_for_it(
    streams: int, step_ms: int, tokens: int, wait_ms: int
) -> None:
    """A real writer, its attempts and the simulated engine."""
    late_ms, entries = virtual_time.run(lateness(streams, step_ms))
    assert len(late_ms) / entries == pytest.approx(tokens, rel=0.05)
    assert max(late_ms) < wait_ms


class Engine:
    """Steps of 10 ms, in each an output of every request, and a turn with all of them."""

    def __init__(self, longest_s: float = LONGEST_S) -> None:
        self.pause = Pause(longest_s)
        self.woken: list[tuple[str, int]] = []
        """`(request, when in ms)`."""

    async def step(self, requests: str, step_ms: int = 10) -> list[str]:
        """Another one; returns whose outputs wait for nothing."""
        await asyncio.sleep(step_ms / 1000)
        free = [name for name in requests if not self.pause.holds(partial(self._wake, name))]
        self.pause.stepped()
        return free

    def _wake(self, name: str) -> None:
        self.woken.append((name, round(asyncio.get_running_loop().time() * 1000)))

    async def running(self) -> None:
        """A pause of 45 ms begins at 20 ms."""
        for _ in range(2):
            assert await self.step("abc") == ["a", "b", "c"]
        self.pause.begin(int(0.045 * timings.ENTRIES_PER_S))


def test_a_pause_ends_behind_the_last_step_that_it_has_time_for() -> None:
    async def scene() -> None:
        its = Engine()
        await its.running()
        assert await its.step("ab") == []
        await its.step("")
        assert await its.step("c") == []
        assert its.woken == []
        await its.step("")
        assert its.woken == [("a", 60), ("b", 60), ("c", 60)]
        assert await its.step("a") == ["a"]

    virtual_time.run(scene())


def test_nothing_waits_longer_than_the_longest_wait() -> None:
    async def scene() -> None:
        its = Engine()
        await its.running()
        await its.step("ab")
        await its.step("c", step_ms=200)  # slower than those before
        assert its.woken == [("a", 80), ("b", 80)]

        its = Engine(longest_s=0.03)
        await its.running()
        await its.step("a")
        await its.step("")
        await its.step("")
        assert [name for name, _ in its.woken] == ["a"]  # 20 ms late; the next step would be 30

    virtual_time.run(scene())


@each("longest_s, entries", [(0.0, 100), (0.009, 100), (LONGEST_S, 5), (LONGEST_S, 0)])
def test_without_load_or_time_for_two_steps_nothing_waits(longest_s: float, entries: int) -> None:
    async def scene() -> None:
        its = Engine(longest_s)
        for _ in range(5):
            its.pause.begin(entries)
            assert await its.step("abc") == ["a", "b", "c"]

    virtual_time.run(scene())


def test_a_small_turn_does_not_shorten_a_pause_and_one_without_outputs_is_over() -> None:
    async def scene() -> None:
        its = Engine()
        await its.running()
        its.pause.begin(1)
        assert await its.step("") == []
        assert its.pause.on
        for _ in range(5):
            await its.step("")
        assert await its.step("a") == ["a"]

    virtual_time.run(scene())


def test_an_engine_that_tells_no_steps_has_no_pause() -> None:
    async def scene() -> None:
        pause = Pause(LONGEST_S)
        pause.begin(256)
        assert not pause.holds(pytest.fail)

    virtual_time.run(scene())
