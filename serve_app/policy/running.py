"""A request that runs, and what the policies know of it. Pure."""

from __future__ import annotations

import math
from typing import Generic, NamedTuple, TypeVar

from serve_app.contract import Written
from serve_app.policy.prediction import Prediction
from serve_app.policy.waiting import Claimed

C = TypeVar("C", bound=Claimed)


class Running(Generic[C]):
    """One of them, from its first start to its end, also while it waits in between because it has
    yielded. Each is itself: a duplicate queue entry has its own.
    """

    __slots__ = (
        "cost",
        "due_ms",
        "entry",
        "never",
        "paid",
        "predicted",
        "prompt_tokens",
        "reserved_tokens",
        "slices",
        "started_ms",
        "tokens",
        "urgency",
        "yields_to",
    )

    def __init__(self, entry: C, predicted: Prediction, prompt_tokens: float = 0.0) -> None:
        self.entry = entry
        self.predicted = predicted
        """What it was expected to write when it started."""
        self.prompt_tokens = prompt_tokens
        """What it was expected to read."""
        self.reserved_tokens = 0
        """Of the engines' memory, while it runs."""
        self.cost = 0.0
        """What its tenant has paid in advance, since it runs."""
        self.started_ms: int | None = None
        """Unix milliseconds, by Redis's clock: since when it runs. None if it was taken over while
        it ran.
        """
        self.slices = 0
        """How often it has yielded."""
        self.tokens = 0
        """What it had written when it started; more than 0 only after it has yielded."""
        self.paid = 0.0
        """What its tenant has paid for that."""
        self.yields_to: tuple[str, str] | None = None
        """The class and the tenant to whose next request it is about to yield its place."""
        self.due_ms = math.inf
        """From when on it may have to yield, at the earliest."""
        self.urgency = 0
        """The place of its class; the most urgent is 0."""
        self.never = False
        """Whether it cannot be interrupted, because nobody could continue it."""

    def expected(self, written: float) -> float:
        """What it will probably write in all, now that so much is written. Of one that is longer
        than expected, all that is known is that it is long: about as much again.
        """
        return self._within_limit(self.predicted.mean, written)

    @property
    def left_at_most(self) -> float:
        """What it will probably write at most, from its start or its continuation on."""
        return self._within_limit(self.predicted.p90, self.tokens) - self.tokens

    def _within_limit(self, predicted: float, written: float) -> float:
        most = float(self.entry.max_output_tokens or math.inf)
        return max(written, min(max(predicted, 2 * written), most))


class Settled(NamedTuple):
    """A request that has ended: what was expected when it started, and what it has written."""

    entry: Claimed
    predicted: Prediction
    written: Written
    cost: float
