"""The tables that a run prints."""

import math
from collections.abc import Iterable, Sequence

from .comparison import MEASURES, loads_of, middle, ratios, select, systems_of
from .cost_model import Cost
from .measurement import Latency, Row
from .processes import GENERATOR

_COLUMNS = (
    f"{'system':<20}{'load':>6}{'round':>6}{'req/s':>8}{'tok/s':>8}{'TTFT ms p50/p99':>18}"
    f"{'gap ms p50/p99':>17}"
    f"{'end-to-end ms':>17}{'errors':>7}{'µs/tok':>8}{'ms/req':>8}{'gen %':>6}{'idle':>6}"
)
LEGEND = """\
µs/tok, ms/req: CPU of the system over all its processes; gen %: the load generator's share of the
CPU used; idle: cores that the systems waiting for their turn used meanwhile"""


def heading() -> str:
    """The columns' names and a line."""
    return f"{_COLUMNS}\n{'─' * len(_COLUMNS)}"


def line(row: Row) -> str:
    """One row, with what went wrong below it."""
    per_request_ms = row.server_cpu_s / row.requests * 1e3 if row.requests else float("nan")
    text = (
        f"{row.system:<20}{row.load:>6}{row.round:>6}{row.requests_per_s:>8.1f}{row.tokens_per_s:>8.0f}"
        f"{_pair(row.ttft):>18}{_pair(row.inter_token):>17}{_pair(row.end_to_end):>17}{row.errors:>7}"
        f"{row.cpu_per_token_us:>8.0f}{per_request_ms:>8.1f}{row.generator_share:>6.1%}{row.others_cores:>6.2f}"
    )
    return "\n".join(
        [text, *(f"    {count} × {error}" for error, count in row.error_kinds.items())]
    )


def _pair(latency: Latency) -> str:
    return f"{_short(latency.p50_ms)} / {_short(latency.p99_ms)}"


def _short(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def cpu_by_kind(rows: Sequence[Row]) -> str:
    """CPU per token, by system and kind of process, over the loads; medians of the rounds."""
    lines = ["CPU per token (µs) by kind of process, and per request (ms) in brackets"]
    loads = loads_of(rows)
    lines.append(f"{'':<37}" + "".join(f"{'load ' + load:>18}" for load in loads))
    for system in systems_of(rows):
        kinds = sorted({kind for row in rows if row.system == system for kind in row.cpu_s})
        for kind in sorted(kinds, key=lambda kind: kind == GENERATOR):
            cells = [_cost_cell(select(rows, system, load), kind) for load in loads]
            lines.append(f"{system:<20}{kind:<17}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def _cost_cell(rows: Sequence[Row], kind: str) -> str:
    per_token_us = middle(
        rows, lambda row: row.cpu_s.get(kind, 0.0) / row.tokens * 1e6 if row.tokens else 0.0
    )
    per_request_ms = middle(
        rows, lambda row: row.cpu_s.get(kind, 0.0) / row.requests * 1e3 if row.requests else 0.0
    )
    return f"{per_token_us:.0f} ({per_request_ms:.1f})"


def comparison(rows: Sequence[Row]) -> str:
    """The first system against the others: the ratio of every round, and their median."""
    lines: list[str] = []
    found = ratios(rows)
    for name in MEASURES:
        lines.append(f"\n{name}: {systems_of(rows)[0]} ÷ peer")
        for ratio in found:
            if ratio.measure == name:
                rounds = "  ".join(f"{value:6.2f}" for value in ratio.per_round)
                lines.append(
                    f"  {ratio.theirs:<20}load {ratio.load:>5}   median {ratio.median:6.2f}   "
                    f"rounds {rounds}"
                )
    return "\n".join(lines).lstrip()


def costs(found: Iterable[Cost]) -> str:
    """The cost model as a table."""
    lines = [f"{'system':<20}{'kind of process':<19}{'µs per token':>14}{'ms per request':>16}"]
    lines += [
        f"{cost.system:<20}{cost.kind:<19}{cost.per_token_us:>14.1f}{cost.per_request_ms:>16.3f}"
        for cost in found
    ]
    return "\n".join(lines)
