"""How far batches are, and how near their deadlines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from heapq import nsmallest
from operator import itemgetter
from typing import NamedTuple

from serve_app.batches.record import BatchState

_MOST_SHOWN = 20
"""Batches that a label names."""


class Pace:
    """How fast lines get their results, in the time in which some of them ran: a batch that waits
    for its window or for another batch is not slow.
    """

    def __init__(self) -> None:
        self.done = 0
        """Lines with a result."""
        self._ran_s = 0.0
        self._since_s: float | None = None

    def runs(self, some: bool, now_s: float) -> None:
        """From now on some lines run, or none. `now_s`: monotonic."""
        self._ran_s, self._since_s = self._total_s(now_s), now_s if some else None

    def needed_s(self, lines: int, now_s: float) -> float:
        """How long so many lines take; 0 while that is not known."""
        return lines * self._total_s(now_s) / self.done if self.done else 0.0

    def _total_s(self, now_s: float) -> float:
        return self._ran_s + (0.0 if self._since_s is None else now_s - self._since_s)


class Progress(NamedTuple):
    """What a batch does now."""

    batch_id: str
    state: BatchState
    in_flight: int
    """Lines with a request."""
    left: int
    """Lines without a written result, these included."""
    paused: bool
    """Whether its window is closed."""
    spare_s: float
    """How much earlier than its deadline it will be done; negative: how much later."""


def shown(found: Iterable[Progress]) -> tuple[Counter[str], Counter[str], dict[str, float]]:
    """What the metrics say of batches that are not over: how many are in each state, how many lines
    are, and the time to spare of those that have the least. Lines and time of those that are ending
    do not count.
    """
    batches, spare_s = Counter[str](), dict[str, float]()
    lines = Counter(in_flight=0, waiting=0, paused=0)
    for one in found:
        batches[one.state] += 1
        if one.state in (BatchState.VALIDATING, BatchState.IN_PROGRESS):
            lines["in_flight"] += one.in_flight
            lines["paused" if one.paused else "waiting"] += one.left - one.in_flight
            spare_s[one.batch_id] = one.spare_s
    return batches, lines, dict(nsmallest(_MOST_SHOWN, spare_s.items(), itemgetter(1)))
