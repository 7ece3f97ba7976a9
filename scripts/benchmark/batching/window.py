"""First in, first out, with at most so many at a time: serial, async:N and continuous."""

from collections import deque

from .job import Job


class Window:
    """Starts the oldest job whenever fewer than ``slots`` run; None starts every job at once."""

    def __init__(self, slots: int | None) -> None:
        self._slots = slots
        self._queue: deque[Job] = deque()
        self._running = 0

    @property
    def waiting(self) -> int:
        """See `Batcher`."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """How many jobs have started and not ended."""
        return self._running

    @property
    def slots(self) -> int | None:
        """See `Batcher`."""
        return self._slots

    def resize(self, slots: int) -> None:
        """From now on at most ``slots`` run; what runs already ends in peace."""
        self._slots = slots

    def add(self, job: Job) -> None:
        """See `Batcher`."""
        self._queue.append(job)

    def next(self, now_s: float) -> list[Job]:
        """See `Batcher`."""
        free = len(self._queue)
        if self._slots is not None:
            free = min(free, max(0, self._slots - self._running))
        self._running += free
        return [self._queue.popleft() for _ in range(free)]

    def ended(self, job: Job) -> None:
        """See `Batcher`."""
        self._running -= 1

    def wake_s(self) -> float | None:
        """See `Batcher`: only an arrival or an end changes anything."""
        return None
