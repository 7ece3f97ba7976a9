"""Pure numbers: percentiles, rows of several rounds made into medians and ratios, arrivals."""

import math
import random
from collections.abc import Callable, Sequence
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


@dataclass(frozen=True)
class Spread:
    """The median of the rounds, and the lowest and the highest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """The spread of one value per round; there must be one."""
        return cls(round(median(values), 4), round(min(values), 4), round(max(values), 4))


@dataclass(frozen=True)
class Ratio:
    """A figure of one over that of another, round by round."""

    measure: str
    load: str
    ours: str
    theirs: str
    per_round: tuple[float, ...]
    spread: Spread


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


def round_ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """``ours / theirs`` round by round: noise that lasts longer than a round cancels out of each
    ratio.

    A round in which the other side measured nothing has no ratio and is left out.
    """
    return [
        own / other
        for own, other in zip(ours, theirs, strict=True)
        if other > 0 and not math.isnan(own)
    ]


def names_of(rows: Sequence[Measured]) -> list[str]:
    """The names in the order in which they came."""
    return list(dict.fromkeys(row.name for row in rows))


def loads_of(rows: Sequence[Measured]) -> list[str]:
    """The loads in the order in which they came."""
    return list(dict.fromkeys(row.load for row in rows))


def select(rows: Sequence[Row], name: str, load: str) -> list[Row]:
    """The rounds of one name at one load, in order."""
    found = [row for row in rows if (row.name, row.load) == (name, load)]
    return sorted(found, key=lambda row: row.round)


def spread(rows: Sequence[Measured], name: str, load: str, measure: Measure) -> Spread:
    """One figure over the rounds."""
    return Spread.of([measure(row) for row in select(rows, name, load)])


def ratio(
    rows: Sequence[Measured], load: str, ours: str, theirs: str, measure: tuple[str, Measure]
) -> Ratio | None:
    """A figure (its name, and how to get it) of ``ours`` over that of ``theirs``; None if no round
    can be compared.
    """
    name, figure = measure
    own, other = ([figure(row) for row in select(rows, one, load)] for one in (ours, theirs))
    per_round = tuple(round(value, 4) for value in round_ratios(own, other))
    return Ratio(name, load, ours, theirs, per_round, Spread.of(per_round)) if per_round else None


def poisson_arrivals_s(rate_per_s: float, duration_s: float, seed: int) -> list[float]:
    """Arrival times in seconds from the start, as independent users cause them; equal for equal
    seeds.
    """
    if rate_per_s <= 0:
        raise ValueError(f"the rate must be above 0 requests/s, not {rate_per_s}")
    rng = random.Random(seed)
    arrivals_s: list[float] = []
    now_s = rng.expovariate(rate_per_s)
    while now_s < duration_s:
        arrivals_s.append(now_s)
        now_s += rng.expovariate(rate_per_s)
    return arrivals_s


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
