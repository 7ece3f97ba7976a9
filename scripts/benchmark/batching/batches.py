"""Closed batches: all of a batch must end before the next one starts. static:N and dynamic:N/…"""

from collections import deque
from collections.abc import Iterable
from itertools import accumulate, takewhile

from .job import Job


class Batches:
    """Collects a batch, runs it, waits for all of it to end, and only then starts the next one.

    A batch is complete at ``size`` jobs, or when ``max_tokens`` leave no room for the next one in
    the queue, or when its oldest job has waited for ``wait_s``. None means that this never
    completes a batch. A job that alone has more than ``max_tokens`` is a batch of its own.
    """

    def __init__(self, size: int, wait_s: float | None, max_tokens: int | None) -> None:
        self._size = size
        self._wait_s = wait_s
        self._max_tokens = max_tokens
        self._queue: deque[Job] = deque()
        self._running = 0

    @property
    def waiting(self) -> int:
        """See `Batcher`."""
        return len(self._queue)

    @property
    def slots(self) -> int | None:
        """See `Batcher`."""
        return self._size

    def add(self, job: Job) -> None:
        """See `Batcher`."""
        self._queue.append(job)

    def next(self, now_s: float) -> list[Job]:
        """See `Batcher`."""
        if self._running or not self._queue:
            return []
        fitting = self._fitting()
        full = fitting == self._size or fitting < len(self._queue)
        wake_s = self.wake_s()
        if not full and (wake_s is None or now_s < wake_s):
            return []
        self._running = fitting
        return [self._queue.popleft() for _ in range(fitting)]

    def ended(self, job: Job) -> None:
        """See `Batcher`."""
        self._running -= 1

    def wake_s(self) -> float | None:
        """See `Batcher`: when the oldest job has waited long enough."""
        if self._running or not self._queue or self._wait_s is None:
            return None
        return self._queue[0].arrived_s + self._wait_s

    def _fitting(self) -> int:
        """How many of the queue's first jobs make the next batch."""
        count = min(self._size, len(self._queue))
        if self._max_tokens is None:
            return count
        return max(1, min(count, _within(self._queue, self._max_tokens)))


def _within(jobs: Iterable[Job], max_tokens: int) -> int:
    sums = accumulate(job.tokens for job in jobs)
    return sum(1 for _ in takewhile(lambda tokens: tokens <= max_tokens, sums))
