"""A request that runs, and what the policies know of it. Pure."""

from __future__ import annotations

from typing import Generic, TypeVar

from serve_app.policy.prediction import Prediction
from serve_app.policy.waiting import Claimed

C = TypeVar("C", bound=Claimed)


class Running(Generic[C]):
    """One of them, from its start to its end. Each is itself: a duplicate queue entry has its
    own.
    """

    __slots__ = ("cost", "entry", "predicted", "reserved_tokens", "started_ms")

    def __init__(
        self,
        entry: C,
        predicted: Prediction,
        cost: float,
        started_ms: int | None,
        reserved_tokens: int = 0,
    ) -> None:
        self.entry = entry
        self.predicted = predicted
        """What it was expected to write when it started."""
        self.cost = cost
        """What its tenant has paid in advance."""
        self.started_ms = started_ms
        """Unix milliseconds, by Redis's clock; None if it was taken over while it ran."""
        self.reserved_tokens = reserved_tokens
        """Of the engines' memory, until it ends."""
