"""A window that follows the demand: it doubles from 8 to 64 and halves again."""

from .job import Job
from .window import Window

SMALLEST = 8
LARGEST = 64
_GROW_ABOVE = 0.7
_SHRINK_BELOW = 0.5
LOOK_EVERY_S = 0.1


class Tuned:
    """Looks at the load ten times a second: jobs that run or wait, per slot of the window.

    Above a load of 0.7 the window doubles, below 0.5 it halves, and it stays from 8 to 64. A
    demand of 70 to 100 % of a window makes it grow and shrink in turn. That holds no job back,
    because the demand fits into the smaller window, too.
    """

    def __init__(self) -> None:
        self._window = Window(SMALLEST)
        self._slots = SMALLEST
        self._looked_s = float("-inf")

    @property
    def waiting(self) -> int:
        """See `Batcher`."""
        return self._window.waiting

    @property
    def slots(self) -> int | None:
        """See `Batcher`."""
        return self._slots

    def add(self, job: Job) -> None:
        """See `Batcher`."""
        self._window.add(job)

    def next(self, now_s: float) -> list[Job]:
        """See `Batcher`."""
        if now_s >= self._looked_s + LOOK_EVERY_S:
            self._looked_s = now_s
            self._look()
        return self._window.next(now_s)

    def ended(self, job: Job) -> None:
        """See `Batcher`."""
        self._window.ended(job)

    def wake_s(self) -> float | None:
        """See `Batcher`: the next look, if a larger window would start something."""
        if not self._window.waiting or self._slots == LARGEST:
            return None
        return self._looked_s + LOOK_EVERY_S

    def _look(self) -> None:
        load = (self._window.running + self._window.waiting) / self._slots
        if load > _GROW_ABOVE:
            self._slots = min(LARGEST, 2 * self._slots)
        elif load < _SHRINK_BELOW:
            self._slots = max(SMALLEST, self._slots // 2)
        self._window.resize(self._slots)
