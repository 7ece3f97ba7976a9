"""What a token and a request cost, by kind of process, from runs of two shapes."""

from collections.abc import Sequence
from dataclasses import dataclass

from .measurement import Row
from .processes import Kind
from .stats import median, split_cost

TOTAL: Kind = "all of it"


@dataclass(frozen=True)
class Cost:
    """CPU of one kind of process: microseconds per token and milliseconds per request."""

    system: str
    kind: Kind
    per_token_us: float
    per_request_ms: float


def cost_model(rows: Sequence[Row]) -> list[Cost]:
    """Medians over the rounds of the split, by system and kind, the sum over a system's kinds
    last.
    """
    costs: list[Cost] = []
    for system in dict.fromkeys(row.system for row in rows):
        mine = [row for row in rows if row.system == system and row.requests > row.errors]
        pairs = [(short, long) for short in mine for long in mine if _are_pair(short, long)]
        for kind in [*sorted({kind for row in mine for kind in row.cpu_s}), TOTAL]:
            splits = [_split(short, long, kind) for short, long in pairs]
            if splits:
                per_token_us = median([per_token_s * 1e6 for _, per_token_s in splits])
                per_request_ms = median([fixed_s * 1e3 for fixed_s, _ in splits])
                costs.append(Cost(system, kind, round(per_token_us, 1), round(per_request_ms, 3)))
    return costs


def _are_pair(short: Row, long: Row) -> bool:
    return short.round == long.round and short.max_tokens < long.max_tokens


def _split(short: Row, long: Row, kind: Kind) -> tuple[float, float]:
    return split_cost(
        short.tokens / short.requests,
        _cpu_s(short, kind) / short.requests,
        long.tokens / long.requests,
        _cpu_s(long, kind) / long.requests,
    )


def _cpu_s(row: Row, kind: Kind) -> float:
    return row.server_cpu_s if kind == TOTAL else row.cpu_s.get(kind, 0.0)
