"""Pure numbers: percentiles, and the rounds of a measurement made into medians and ratios."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar


class Measured(Protocol):
    """A row of a table: what was measured, under which load, in which round."""

    name: str
    load: str
    round: int


Row = TypeVar("Row", bound=Measured)
Measure = Callable[[Any], float]
"""One figure of a row."""


@dataclass(frozen=True)
class Latency:
    """Two percentiles of a time, in milliseconds."""

    p50_ms: float
    p99_ms: float

    @classmethod
    def of_seconds(cls, values_s: Sequence[float]) -> "Latency":
        """Percentiles of times given in seconds."""
        return cls(*(round(percentile(values_s, percent) * 1e3, 3) for percent in (50, 99)))


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of ``values`` lie, interpolated linearly; NaN when there
    are none.
    """
    if not values:
        return math.nan
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two in the middle; NaN when there are none."""
    return percentile(values, 50)


def names_of(rows: Sequence[Measured]) -> list[str]:
    return list(dict.fromkeys(row.name for row in rows))


def loads_of(rows: Sequence[Measured]) -> list[str]:
    return list(dict.fromkeys(row.load for row in rows))


def select(rows: Sequence[Row], name: str, load: str) -> list[Row]:
    """The rounds of one name at one load, in order."""
    found = [row for row in rows if (row.name, row.load) == (name, load)]
    return sorted(found, key=lambda row: row.round)


@dataclass(frozen=True)
class Ratio:
    """A figure of one over that of another, round by round: noise that lasts longer than a round
    cancels out of each.
    """

    measure: str
    load: str
    ours: str
    theirs: str
    per_round: tuple[float, ...]


def ratios(
    rows: Sequence[Measured], pairs: Iterable[tuple[str, str]], measures: dict[str, Measure]
) -> list[Ratio]:
    """Every measure at every load, the first of each pair over the second. A round in which the
    second measured nothing has no ratio, and is left out.
    """
    found = []
    for name, figure in measures.items():
        for ours, theirs in pairs:
            for load in loads_of(rows):
                both = zip(select(rows, ours, load), select(rows, theirs, load), strict=True)
                values = ((figure(own), figure(other)) for own, other in both)
                per_round = [a / b for a, b in values if b > 0 and not math.isnan(a)]
                if per_round:
                    rounded = tuple(round(value, 4) for value in per_round)
                    found.append(Ratio(name, load, ours, theirs, rounded))
    return found


def split_cost(
    short_tokens: float, short_cpu_s: float, long_tokens: float, long_cpu_s: float
) -> tuple[float, float]:
    """Fixed seconds per request and seconds per token, from the CPU of one request of each of two
    lengths.

    ``cpu = fixed + tokens * per_token`` is solved for the two shapes. Noise can make either
    slightly negative; it is left so, because clipping would hide how noisy the measurement was.
    """
    if long_tokens <= short_tokens:
        raise ValueError(
            f"the long shape ({long_tokens} tokens) must exceed the short one ({short_tokens})"
        )
    per_token_s = (long_cpu_s - short_cpu_s) / (long_tokens - short_tokens)
    return short_cpu_s - short_tokens * per_token_s, per_token_s
