"""The rows of `--order`, and their medians over the rounds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ..batching.summary import Spread
from ..connection import Exchange
from ..measurement import Latency
from ..stats import percentile, round_ratios
from .engine_page import Reading

T = TypeVar("T")


@dataclass(frozen=True)
class BacklogRow:
    """One round with a backlog: the engine's own figures, and what ended meanwhile."""

    round: int
    requests: int
    errors: int
    tokens_per_s: float
    engine_running_p50: float
    engine_waiting_p50: float
    engine_waiting_p99: float
    held_back_p50: float
    """Requests that were sent and had not reached the engine."""
    preemptions: float
    kv_used_p50: float
    kv_used_p10: float

    @property
    def preemptions_per_request(self) -> float:
        """Of the requests that ended in the round; NaN if none did."""
        return self.preemptions / self.requests if self.requests else float("nan")

    @classmethod
    def of(
        cls, number: int, users: int, readings: Sequence[Reading], ended: Sequence[Exchange]
    ) -> "BacklogRow":
        """The row of a round; ``ended``: what ended between the first and the last reading."""
        running = [one.running for one in readings]
        waiting = [one.waiting for one in readings]
        kv_used = [one.kv_used for one in readings]
        held_back = [users - one.running - one.waiting for one in readings]
        good = [one for one in ended if one.error is None]
        duration_s = readings[-1].at_s - readings[0].at_s
        return cls(
            round=number,
            requests=len(good),
            errors=len(ended) - len(good),
            tokens_per_s=round(sum(one.tokens for one in good) / duration_s, 1),
            engine_running_p50=percentile(running, 50),
            engine_waiting_p50=percentile(waiting, 50),
            engine_waiting_p99=round(percentile(waiting, 99), 2),
            held_back_p50=percentile(held_back, 50),
            preemptions=readings[-1].preemptions - readings[0].preemptions,
            kv_used_p50=round(percentile(kv_used, 50), 4),
            kv_used_p10=round(percentile(kv_used, 10), 4),
        )


@dataclass(frozen=True)
class ShortRow:
    """One round of short requests, alone or beside long generations."""

    round: int
    beside_long: bool
    requests: int
    errors: int
    ttft: Latency
    end_to_end: Latency
    long_s: float = 0.0
    """How long the slowest of the long generations took."""
    long_gap_s: float = 0.0
    """The longest time in which one of them wrote nothing."""
    long_errors: list[str] = field(default_factory=list)
    texts_differ: int = 0
    long_attempts: list[int] = field(default_factory=list)
    """Attempts of each of the long generations, if the service tells; more than one after a yield.
    """

    @classmethod
    def of(cls, number: int, beside_long: bool, exchanges: Sequence[Exchange]) -> "ShortRow":
        """The row of the short requests; the figures of the long ones are added by who has them."""
        good = [one for one in exchanges if one.error is None]
        return cls(
            round=number,
            beside_long=beside_long,
            requests=len(exchanges),
            errors=len(exchanges) - len(good),
            ttft=Latency.of_seconds(
                [one.first_token_s - one.started_s for one in good if one.first_token_s is not None]
            ),
            end_to_end=Latency.of_seconds(
                [one.finished_s - one.started_s for one in good if one.finished_s is not None]
            ),
        )


def spread_of(rows: Sequence[T], measure: Callable[[T], float]) -> Spread:
    """One figure over the rounds."""
    return Spread.of([measure(row) for row in rows])


def ratio_beside(rows: Sequence[ShortRow], measure: Callable[[ShortRow], float]) -> Spread | None:
    """A figure of the short requests beside long ones ÷ the same alone, round by round; None if no
    round has both.
    """
    beside = [measure(row) for row in rows if row.beside_long]
    alone = [measure(row) for row in rows if not row.beside_long]
    per_round = round_ratios(beside, alone)
    return Spread.of(per_round) if per_round else None
