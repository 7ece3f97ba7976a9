"""A clock that a test controls."""

from __future__ import annotations


class TurnedClock:
    """A clock that only moves when a test sets it: `clock.now_s += 1`."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.unix_offset_s = 900.5

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_s(self) -> float:
        return self.now_s + self.unix_offset_s
