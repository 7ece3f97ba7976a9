"""How long an engine keeps outputs, in virtual time."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from scripts.benchmark.lateness import lateness
from scripts.simulation import virtual_time
from serve_app.journal.pause import Pause, together
from tests.tables import each

LONGEST_S = 0.05


@each(
    "streams, step_ms, expected",
    [
        (8, 10, 1),  # 800 outputs/s: a worker has room
        (11, 10, 1),
        (13, 10, 2),
        (32, 10, 5),
        (256, 10, 5),  # an output waits for 40 ms
        (64, 20, 3),
        (32, 25, 2),
        (256, 25, 2),
        (256, 33, 2),
        (256, 46, 1),  # a pause would merge nothing
    ],
)
def test_as_many_become_one_as_the_load_calls_for_and_their_wait_allows(
    streams: int, step_ms: int, expected: int
) -> None:
    assert together(streams * 1000 / step_ms, streams, LONGEST_S) == expected
    assert together(streams * 1000 / step_ms, streams, 0.0) == 1


def test_without_outputs_there_is_no_pause() -> None:
    assert together(0.0, 0, LONGEST_S) == 1


@pytest.mark.parametrize(
    ("streams", "step_ms", "tokens", "wait_ms"),
    [(8, 10, 1, 1), (32, 10, 5, 42), (64, 25, 2, 28), (256, 25, 2, 34), (256, 33, 2, 42)],
)
def test_what_a_worker_writes_and_what_a_reader_waits_for_it(
    streams: int, step_ms: int, tokens: int, wait_ms: int
) -> None:
    """A real writer, its attempts and the simulated engine."""
    late_ms, entries = virtual_time.run(lateness(streams, step_ms))
    assert len(late_ms) / entries == pytest.approx(tokens, rel=0.05)
    assert max(late_ms) < wait_ms


class Woken:
    """A pause that lasts, and the requests whose outputs wait in it."""

    def __init__(self, together: int = 3) -> None:
        self.pause = Pause(LONGEST_S)
        self.pause.on, self.pause.together = True, together
        self.waiting = dict.fromkeys("abcdef", 0)
        self.woken: list[tuple[str, int, float]] = []
        """`(request, its outputs, when)`."""

    def step(self, requests: str) -> None:
        for name in requests:
            if not self.pause.holds(self.waiting[name], partial(self._wake, name)):
                self._wake(name, 1)
                continue
            self.waiting[name] += 1

    def _wake(self, name: str, more: int = 0) -> None:
        self.woken.append((name, self.waiting[name] + more, asyncio.get_running_loop().time()))
        self.waiting[name] = 0


def test_a_pause_ends_behind_the_step_that_fills_it_and_nothing_waits_longer() -> None:
    async def scene() -> None:
        its = Woken()
        for _ in range(3):
            await asyncio.sleep(0.01)
            assert its.woken == []
            # As vLLM's engine hands its outputs over, a part in each turn of the event loop:
            for some in ("ab", "cd", "ef"):
                its.step(some)
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert its.woken == [(name, 3, 0.03) for name in "abcdef"]
        its.step("a")
        assert its.woken[6:] == [("a", 1, 0.03)]
        assert not its.pause.on

    virtual_time.run(scene())


def test_a_pause_ends_when_steps_become_slow() -> None:
    async def scene() -> None:
        its = Woken()
        await asyncio.sleep(1.0)  # while nothing waits there is no hurry
        its.step("ab")
        await asyncio.sleep(0.03)
        its.step("b")
        await asyncio.sleep(1.0)
        assert its.woken == [("a", 1, 1.0 + LONGEST_S), ("b", 2, 1.0 + LONGEST_S)]

    virtual_time.run(scene())


def test_a_pause_follows_the_load_up_and_down() -> None:
    """Five times a stream's rate at once: steps of 10 ms, 32 streams and then one."""

    async def scene() -> None:
        pause, found = Pause(LONGEST_S), []
        for streams in (32, 1):
            for _ in range(60):
                await asyncio.sleep(0.01)
                for _ in range(streams):
                    pause.holds(0, lambda: None)
                if not pause.on:
                    pause.begin(streams)
                pause.end()
                pause.begin(streams)
                found.append(pause.together)
        assert found[0] == 1
        assert set(found[40:60]) == {5}
        assert found[-1] == 1

    virtual_time.run(scene())


def test_turned_off_it_never_begins() -> None:
    async def scene() -> None:
        pause = Pause(0.0)
        for _ in range(100):
            await asyncio.sleep(0.01)
            for _ in range(256):
                assert not pause.holds(0, pytest.fail)
            pause.begin(256)

    virtual_time.run(scene())
