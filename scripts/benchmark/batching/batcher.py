"""What every batcher is: a pure object that says which waiting jobs start now."""

from typing import Protocol

from .job import Job


class Batcher(Protocol):
    """Knows no clock and does no I/O: whoever turns it says what time it is."""

    @property
    def waiting(self) -> int:
        """How many jobs have been added and have not started."""
        ...

    @property
    def slots(self) -> int | None:
        """How many jobs may run at a time now; None means as many as come."""
        ...

    def add(self, job: Job) -> None:
        """A job has arrived."""
        ...

    def next(self, now_s: float) -> list[Job]:
        """The jobs that start now; each runs until ``ended`` is called for it."""
        ...

    def ended(self, job: Job) -> None:
        """A job no longer runs."""
        ...

    def wake_s(self) -> float | None:
        """When ``next`` may start something although nothing arrives and nothing ends."""
        ...
