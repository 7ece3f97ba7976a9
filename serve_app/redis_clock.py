"""Redis's clock, as every process reckons it: what one writes and another compares is this time.

The clocks of nodes may differ by seconds; Redis has one. Pure: membership's renewals tell it what Redis's `TIME` shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_QUICK_S = 0.25
_GOOD_FOR_S = 10.0
"""The quickest answer of this time counts: it says most exactly when it was given."""


class RedisClock:
    """Unix time by Redis's clock; by this machine's own until Redis has been asked.

    Args:
        local_s: this machine's Unix time, in seconds.
    """

    def __init__(self, local_s: Callable[[], float] = time.time) -> None:
        self._local_s = local_s
        self._ahead_s: float | None = None
        """What Redis's clock shows less what `time.monotonic` shows."""
        self._took_s = self._told_s = 0.0

    @property
    def known(self) -> bool:
        """Whether Redis has been asked."""
        return self._ahead_s is not None

    def now_s(self) -> float:
        """Unix seconds."""
        return self._local_s() if self._ahead_s is None else time.monotonic() + self._ahead_s

    def now_ms(self) -> int:
        """Unix milliseconds."""
        return int(self.now_s() * 1000)

    def told(self, answer: tuple[int, int], asked_s: float) -> None:
        """Redis has answered a `TIME` that was sent at `asked_s` of `time.monotonic`.

        An answer that took long says little of when it was given: it counts only where there is no better one.
        """
        seconds, microseconds = answer
        now_s = time.monotonic()
        took_s, age_s = now_s - asked_s, now_s - self._told_s
        if took_s <= self._took_s or (took_s <= _QUICK_S and age_s > _GOOD_FOR_S) or self._ahead_s is None:
            self._took_s, self._told_s = took_s, now_s
            self._ahead_s = seconds + microseconds / 1e6 - (asked_s + now_s) / 2
