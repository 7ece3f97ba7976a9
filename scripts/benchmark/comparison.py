"""Rows of several rounds made into one figure per system and load, and into ratios that noise
spares.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .measurement import Row
from .stats import median, round_ratios

Measure = Callable[[Row], float]
MEASURES: dict[str, Measure] = {
    "tokens/s": lambda row: row.tokens_per_s,
    "TTFT p50": lambda row: row.ttft.p50_ms,
    "end-to-end p99": lambda row: row.end_to_end.p99_ms,
    "CPU per token": lambda row: row.cpu_per_token_us,
}


@dataclass(frozen=True)
class Ratio:
    """The first system's figure over a peer's, round by round, and the median of the rounds."""

    measure: str
    load: str
    ours: str
    theirs: str
    per_round: tuple[float, ...]
    median: float


def loads_of(rows: Sequence[Row]) -> list[str]:
    """The loads in the order in which they came."""
    return list(dict.fromkeys(row.load for row in rows))


def systems_of(rows: Sequence[Row]) -> list[str]:
    """The systems in the order in which they came; the first is the one that the ratios are
    about.
    """
    return list(dict.fromkeys(row.system for row in rows))


def select(rows: Sequence[Row], system: str, load: str) -> list[Row]:
    """The rounds of one system at one load, in order."""
    return sorted(
        (row for row in rows if (row.system, row.load) == (system, load)), key=lambda row: row.round
    )


def middle(rows: Sequence[Row], measure: Measure) -> float:
    """The median of a figure over rounds."""
    return median([measure(row) for row in rows])


def ratios(rows: Sequence[Row]) -> list[Ratio]:
    """Every measure at every load, the first system against each of the others."""
    ours, *peers = systems_of(rows)
    found: list[Ratio] = []
    for name, measure in MEASURES.items():
        for theirs in peers:
            for load in loads_of(rows):
                own = [measure(row) for row in select(rows, ours, load)]
                other = [measure(row) for row in select(rows, theirs, load)]
                per_round = round_ratios(own, other)
                rounded = tuple(round(ratio, 4) for ratio in per_round)
                found.append(Ratio(name, load, ours, theirs, rounded, round(median(per_round), 4)))
    return found
