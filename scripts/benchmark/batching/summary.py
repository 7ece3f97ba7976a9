"""The rows of several rounds made into one line per batcher and load, and into ratios."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..stats import median, round_ratios
from .row import BatchRow

Measure = Callable[[BatchRow], float]
_CLOSED = ("static", "dynamic")
_FIXED = ("async",)
_MIXED = ("hybrid", "split")


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
class BatchRatio:
    """How many times another batcher's tokens/s one of them reached, round by round, and the same
    for each second of CPU that the server got.
    """

    load: str
    ours: str
    theirs: str
    per_round: tuple[float, ...]
    spread: Spread
    per_cpu: Spread | None


def loads_of(rows: Sequence[BatchRow]) -> list[str]:
    """The loads in the order in which they came."""
    return list(dict.fromkeys(row.load for row in rows))


def batchers_of(rows: Sequence[BatchRow]) -> list[str]:
    """The batchers in the order in which they came."""
    return list(dict.fromkeys(row.batcher for row in rows))


def select(rows: Sequence[BatchRow], batcher: str, load: str) -> list[BatchRow]:
    """The rounds of one batcher at one load, in order."""
    found = [row for row in rows if (row.batcher, row.load) == (batcher, load)]
    return sorted(found, key=lambda row: row.round)


def spread(rows: Sequence[BatchRow], batcher: str, load: str, measure: Measure) -> Spread:
    """One figure over the rounds."""
    return Spread.of([measure(row) for row in select(rows, batcher, load)])


def ratio(rows: Sequence[BatchRow], load: str, ours: str, theirs: str) -> BatchRatio | None:
    """Noise that lasts longer than a round cancels out; None if no round can be compared."""
    own, other = select(rows, ours, load), select(rows, theirs, load)
    per_round = _per_round(own, other, lambda row: row.tokens_per_s)
    if not per_round:
        return None
    per_cpu = _per_round(own, other, lambda row: row.tokens_per_cpu_s)
    return BatchRatio(
        load,
        ours,
        theirs,
        per_round,
        Spread.of(per_round),
        Spread.of(per_cpu) if per_cpu else None,
    )


def _per_round(
    ours: Sequence[BatchRow], theirs: Sequence[BatchRow], measure: Measure
) -> tuple[float, ...]:
    found = round_ratios([measure(row) for row in ours], [measure(row) for row in theirs])
    return tuple(round(value, 4) for value in found)


def ratios(rows: Sequence[BatchRow]) -> list[BatchRatio]:
    """Continuous against each, tuned against the best fixed window, hybrid and split against the
    better of closed batches and fixed windows, and split against the better of its two parts; at
    every load.
    """
    names = batchers_of(rows)
    found: list[BatchRatio | None] = []
    for load in loads_of(rows):
        pairs = [("continuous", name) for name in names if name != "continuous"]
        pairs += [("tuned", best) for best in _best(rows, load, _FIXED)]
        hybrids = [name for name in names if _kind(name) in _MIXED]
        pairs += [
            (ours, best) for ours in hybrids for best in _best(rows, load, (*_CLOSED, *_FIXED))
        ]
        pairs += [
            (ours, best)
            for ours in names
            for best in _best(rows, load, (*_CLOSED, *_FIXED), among=_parts(ours))
        ]
        found += [ratio(rows, load, *pair) for pair in dict.fromkeys(pairs) if pair[0] in names]
    return [one for one in found if one is not None]


def _best(
    rows: Sequence[BatchRow], load: str, kinds: Sequence[str], among: Sequence[str] | None = None
) -> list[str]:
    """The name of the batcher of these kinds with the highest median, ``among`` these alone if they
    are given; empty if there is none.
    """
    names = [name for name in batchers_of(rows) if _kind(name) in kinds]
    if among is not None:
        names = [name for name in names if name in among]
    names.sort(key=lambda name: spread(rows, name, load, lambda row: row.tokens_per_s).median)
    return names[-1:]


def _parts(name: str) -> list[str]:
    """What a split batcher is made of; nothing for others."""
    kind, _, numbers = name.partition(":")
    window, _, batches = numbers.partition("/")
    return [f"async:{window}", f"dynamic:{batches}"] if kind == "split" else []


def _kind(name: str) -> str:
    return name.partition(":")[0]
