"""The clock of a process, and an estimate of Redis's clock that is the same in every process.
No other module calls Python's `time` (`tests/unit/test_architecture.py` names the exceptions), so
that a simulation can control the clock. Pauses and timeouts follow the event loop's.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple, Protocol

from serve_app import timings


class Clock(Protocol):
    """The clock of this process."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary moment; never decreases. For durations."""

    def unix_s(self) -> float:
        """Unix seconds; may jump."""


class SystemClock:
    """The clock of this machine."""

    monotonic_s = staticmethod(time.monotonic)  # a hot path: nothing in between
    unix_s = staticmethod(time.time)


SYSTEM = SystemClock()


class _Answer(NamedTuple):
    """An answer to `TIME`: when it came (monotonic), how long it took, and Redis's Unix time minus
    the local monotonic time by it.
    """

    at_s: float
    took_s: float
    ahead_s: float


class RedisClock:
    """Unix time by Redis's clock; by this machine's clock until Redis has answered once.

    Use it for every time that one process writes and another compares: the clocks of nodes may
    differ by seconds, but there is only one Redis. Each renewal of a lease passes on what Redis's
    `TIME` returned. `local` is this process's clock, for durations.
    """

    def __init__(self, local: Clock = SYSTEM) -> None:
        self.local = local
        self._ahead_s: float | None = None
        """Redis's Unix time minus the local monotonic time."""
        self._answers: deque[_Answer] = deque()
        """The recent answers; each took longer than the next, so the first is the quickest."""

    @property
    def known(self) -> bool:
        return self._ahead_s is not None

    def now_s(self) -> float:
        """Unix seconds."""
        if self._ahead_s is None:
            return self.local.unix_s()
        return self.local.monotonic_s() + self._ahead_s

    def now_ms(self) -> int:
        """Unix milliseconds."""
        return int(self.now_s() * 1000)

    def told(self, answer: tuple[int, int], asked_s: float) -> None:
        """Redis has answered a `TIME` that was sent at `asked_s` of the local `monotonic_s`. The
        quickest recent answer sets the clock: when Redis gave a slow one is not known.
        """
        seconds, microseconds = answer
        now_s = self.local.monotonic_s()
        ahead_s = seconds + microseconds / 1e6 - (asked_s + now_s) / 2
        found = _Answer(now_s, now_s - asked_s, ahead_s)
        answers = self._answers
        while answers and answers[-1].took_s >= found.took_s:
            answers.pop()
        answers.append(found)
        while now_s - answers[0].at_s > timings.CLOCK_GOOD_FOR_S:
            answers.popleft()
        self._ahead_s = answers[0].ahead_s
