"""`scripts/chaos --strikes N`: so many faults, one by one, each under streams in flight, and then it is over."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from scripts.disorder import __main__ as chaos
from scripts.disorder.account import Strike
from scripts.disorder.faults import Fault
from scripts.disorder.traffic import End, Told


class Whole:
    """A service that is whole again at once."""

    def until_whole(self) -> None:
        """It is."""


def test_it_is_over_after_so_many_strikes_each_under_streams_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    options = chaos.parse(["--engine", "vllm", "--faults", "engine", "--strikes", "3", "--every-s", "0.01"])
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
    monkeypatch.setitem(chaos.FAULTS, "engine", Fault("engine", 2, strike))
    end, strikes = End(time.monotonic() + 60), list[Strike]()
    asyncio.run(asyncio.wait_for(chaos.strike_on(Whole(), options, end, [told], strikes), 30))  # type: ignore[arg-type]
    assert [one.name for one in strikes] == ["engine"] * 3
    assert looked == 5, "the first two looks found no stream in flight"
    assert end.over
