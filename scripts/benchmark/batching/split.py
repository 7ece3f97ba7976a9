"""Interactive jobs and batch work apart, each in slots of its own: split:N/size/wait_ms/tokens."""

from .batches import Batches
from .job import Job
from .window import Window


class Split:
    """A window for interactive jobs beside closed batches for batch work, as where each kind has
    engines of its own. Neither may use what the other leaves free.
    """

    def __init__(self, window: Window, batches: Batches) -> None:
        self._window = window
        self._batches = batches

    @property
    def waiting(self) -> int:
        """See `Batcher`."""
        return self._window.waiting + self._batches.waiting

    @property
    def slots(self) -> int | None:
        """See `Batcher`."""
        parts = (self._window.slots, self._batches.slots)
        return None if None in parts else sum(part or 0 for part in parts)

    def add(self, job: Job) -> None:
        """See `Batcher`."""
        (self._window if job.interactive else self._batches).add(job)

    def next(self, now_s: float) -> list[Job]:
        """See `Batcher`."""
        return self._window.next(now_s) + self._batches.next(now_s)

    def ended(self, job: Job) -> None:
        """See `Batcher`."""
        (self._window if job.interactive else self._batches).ended(job)

    def wake_s(self) -> float | None:
        """See `Batcher`: a window needs no time of its own."""
        return self._batches.wake_s()
