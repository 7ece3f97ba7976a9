"""Interactive jobs straight away, and batch work in the slots that they leave; 70/30 when both
wait.
"""

from collections import deque

from .job import INTERACTIVE_SHARE, Job


class Hybrid:
    """Two queues in front of ``slots`` slots, none of which stays free while anything waits.

    While both queues have work, interactive jobs get 70 % of the slots and batch work the rest.
    Whoever waits alone gets every slot that is free.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._interactive: deque[Job] = deque()
        self._batch: deque[Job] = deque()
        self._running_interactive = 0
        self._running_batch = 0

    @property
    def waiting(self) -> int:
        """See `Batcher`."""
        return len(self._interactive) + len(self._batch)

    @property
    def slots(self) -> int | None:
        """See `Batcher`."""
        return self._slots

    def add(self, job: Job) -> None:
        """See `Batcher`."""
        (self._interactive if job.interactive else self._batch).append(job)

    def next(self, now_s: float) -> list[Job]:
        """See `Batcher`."""
        started: list[Job] = []
        while self.waiting and self._running_interactive + self._running_batch < self._slots:
            job = self._choose().popleft()
            if job.interactive:
                self._running_interactive += 1
            else:
                self._running_batch += 1
            started.append(job)
        return started

    def ended(self, job: Job) -> None:
        """See `Batcher`."""
        if job.interactive:
            self._running_interactive -= 1
        else:
            self._running_batch -= 1

    def wake_s(self) -> float | None:
        """See `Batcher`: only an arrival or an end changes anything."""
        return None

    def _choose(self) -> deque[Job]:
        if not self._batch:
            return self._interactive
        if not self._interactive:
            return self._batch
        within_share = self._running_interactive < INTERACTIVE_SHARE * self._slots
        return self._interactive if within_share else self._batch
