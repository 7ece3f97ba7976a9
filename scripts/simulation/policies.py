"""The orders of work that `--policy` compares."""

import math
from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from serve_app.policy.classes import CLASSES
from serve_app.policy.order import DEFAULT_RULES, Claim, Rules, Running, Scheduler
from serve_app.policy.prediction import LengthModel, Prediction
from serve_app.request_queue import QueueEntry

from .work import Record

_WITHOUT_AGEING = 100.0
"""Milliseconds per token: more than waits make up for, and less than deadlines cut off."""
_FAR_AHEAD = 64.0


class ArrivalOrder:
    """Plain first come, first served, behind the interface of the live scheduler."""

    def __init__(self) -> None:
        self.capacity = 0
        self.general_capacity = math.inf
        self.running: dict[Running[QueueEntry], None] = {}
        self._waiting: list[QueueEntry] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting_sequences(self) -> int:
        """See `Scheduler.waiting_sequences`."""
        return len(self._waiting)

    def waiting(self) -> dict[str, tuple[int, int]]:
        """Nobody asks for these metrics."""
        return {}

    @property
    def full(self) -> bool:
        """Whether no request may start before another has ended."""
        return len(self.running) >= self.capacity

    def wanted(self) -> Claim | None:
        """The oldest of each class, because any of them may be the oldest of all."""
        if self.full:
            return None
        return Claim(CLASSES, self.capacity - len(self.running), wait=not self._waiting)

    def add(self, entry: QueueEntry) -> None:
        insort(self._waiting, entry, key=lambda one: one.accepted_ms)

    def next(self, now_ms: int) -> Running[QueueEntry] | None:
        """The oldest."""
        if not self._waiting or self.full:
            return None
        running = Running(self._waiting.pop(0), Prediction(0.0, 0.0))
        running.started_ms = now_ms
        self.running[running] = None
        return running

    def drop(self, unwanted: Callable[[QueueEntry], bool]) -> bool:
        """See `Scheduler.drop`."""
        before = len(self._waiting)
        self._waiting = [one for one in self._waiting if not unwanted(one)]
        return len(self._waiting) < before

    def give_back(self, _: Iterable[Running[QueueEntry]]) -> None:
        """Nothing is ever in quarantine here."""

    def ended(self, running: Running[QueueEntry], *_: object) -> None:
        del self.running[running]


class KnownLengths(LengthModel):
    """Tells what each request will write, which nobody can know."""

    useful = True

    def __init__(self, records: Mapping[str, Record]) -> None:
        super().__init__()
        self._records = records

    def predict(self, request: Any) -> Prediction:
        tokens = float(self._records[request.request_id].work.output_tokens)
        return Prediction(tokens, tokens)


def _knowing(records: Mapping[str, Record], rules: Rules) -> Scheduler[QueueEntry]:
    scheduler: Scheduler[QueueEntry] = Scheduler(rules)
    scheduler.lengths = KnownLengths(records)
    return scheduler


_SHORTEST = DEFAULT_RULES._replace(short_first_ms_per_cost=_WITHOUT_AGEING, claim_ahead=_FAR_AHEAD)
POLICIES: dict[str, Callable[[Mapping[str, Record]], Any]] = {
    "hermes": lambda _: Scheduler(),
    "fcfs": lambda _: ArrivalOrder(),
    "oracle": lambda records: _knowing(records, DEFAULT_RULES),
    "shortest": lambda records: _knowing(records, _SHORTEST),
}
"""`hermes` is what runs live; `oracle` is the same with every length known; `shortest` also knows
them, and never lets a long request go before a short one of its tenant.
"""
