"""How long to pause before the next try."""

from __future__ import annotations

import random
import time

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0


class RetryClock:
    """Determines the pause before the next try. Time counts from the first failure after
    `restart`.
    """

    def __init__(self, give_up_after_s: float) -> None:
        self._give_up_after_s = give_up_after_s
        self.restart()

    def restart(self) -> None:
        """The service was reached, so the next failure counts as the first."""
        self._longest_s, self._end_s = FIRST_PAUSE_S, float("inf")

    def pause_s(self) -> float | None:
        """Seconds to wait before the next try; None when it is time to give up."""
        now_s = time.monotonic()
        self._end_s = min(self._end_s, now_s + self._give_up_after_s)
        longest_s, self._longest_s = self._longest_s, min(2 * self._longest_s, LONGEST_PAUSE_S)
        return (
            min(random.uniform(0, longest_s), self._end_s - now_s) if now_s < self._end_s else None
        )
