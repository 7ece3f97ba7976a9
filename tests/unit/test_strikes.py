"""`scripts/chaos --strikes N` injects N faults, one by one, each with streams in flight, and then
stops.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from scripts.chaos_testing import __main__ as chaos
from scripts.chaos_testing.account import Strike, pause_s
from scripts.chaos_testing.faults import FAULTS, Fault
from scripts.chaos_testing.traffic import End, Told

pytestmark = pytest.mark.nightly  # a tool


class Whole:
    """A service that is whole again at once."""

    def until_whole(self) -> None:
        """It is."""


async def test_it_is_over_after_so_many_strikes_each_under_streams_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = chaos.parse(
        ["--engine", "vllm", "--faults", "engine", "--strikes", "3", "--every-s", "0.01"]
    )
    assert (options.apart, options.minutes) == (True, 15.0)
    told = Told("Hello", 10, streamed=True)
    looked = 0

    async def strike(parts: Any, pid: int) -> float:
        return time.monotonic()

    def until_whole(_: Whole) -> None:
        nonlocal looked
        looked += 1
        if looked == 3:
            told.arrivals_s.append(time.monotonic())

    monkeypatch.setattr(Whole, "until_whole", until_whole)
    monkeypatch.setattr(chaos, "choose", lambda *_: ("engine", 1))
    monkeypatch.setitem(FAULTS, "engine", Fault("engine", 2, strike))
    end, strikes = End(time.monotonic() + 60), list[Strike]()
    await asyncio.wait_for(chaos.strike_on(Whole(), options, end, [told], strikes), 30)  # type: ignore[arg-type]
    assert [one.name for one in strikes] == ["engine"] * 3
    assert looked == 5, "the first two looks found no stream in flight"
    assert end.over


def stream(*arrivals_s: float) -> Told:
    told = Told("Hello", 10, streamed=True)
    told.arrivals_s.extend(arrivals_s)
    return told


def test_a_pause_begins_after_the_bytes_in_flight_when_the_process_died() -> None:
    dies = Strike("engine", at_s=10.0)
    flushed = stream(9.9, 10.02, 10.03, 12.5, 12.6)
    assert pause_s(dies, [flushed, stream(9.9, 10.1, 10.2)]) == pytest.approx(2.47)
    assert pause_s(dies, [stream(9.0, 13.0)]) == pytest.approx(3.0), "the fault fell into it"
    assert pause_s(dies, [stream(9.9, 10.1, 11.2, 19.0)]) == pytest.approx(1.1), "not a later one"
    assert pause_s(dies, [stream(1.0, 9.0), stream(10.5, 20.0)]) is None, "none was in flight"
