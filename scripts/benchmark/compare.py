"""Systems side by side: who is measured when, the ratios of the first to its peers, and what a
token and a request cost. The systems take turns at every load, so that noise meets all alike.
"""

import zlib
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import uvloop

from . import report
from .batchers import Batcher, alike
from .measurement import Row, maker_for, measure, take_turns, wanted_chars, warm_up
from .processes import GENERATOR, Kind
from .report import Column, Measure, loads_of, median, names_of, select
from .run import HttpEndpoint, Load, Run
from .systems import System

# One token is no stream, and engines answer it on a path of its own; two are the shortest true
# stream.
SHORT_TOKENS = 2
TOTAL: Kind = "all of it"
WARM_UP_USERS = 8

MEASURES: dict[str, Measure] = {
    "tokens/s": lambda row: row.tokens_per_s,
    "TTFT p50": lambda row: row.ttft.p50_ms,
    "end-to-end p99": lambda row: row.end_to_end.p99_ms,
    "CPU per token": lambda row: row.cpu_per_token_us,
}
COLUMNS = (
    Column("req/s", lambda row: row.requests_per_s, ",.1f"),
    Column("tok/s", lambda row: row.tokens_per_s, spread=True),
    Column("TTFT p50 ms", lambda row: row.ttft.p50_ms, ",.1f", spread=True),
    Column("p99", lambda row: row.ttft.p99_ms, ",.1f"),
    Column("gap p50 ms", lambda row: row.inter_token.p50_ms, ",.1f"),
    Column("p99", lambda row: row.inter_token.p99_ms, ",.1f"),
    Column("end-to-end p50 ms", lambda row: row.end_to_end.p50_ms),
    Column("p99", lambda row: row.end_to_end.p99_ms),
    Column("errors", lambda row: row.errors),
    Column("lost", lambda row: row.lost),
    Column("µs/tok", lambda row: row.cpu_per_token_us),
    Column("ms/req", lambda row: row.cpu_per_request_ms, ",.1f"),
    Column("gen %", lambda row: row.generator_share, ".1%"),
    Column("idle", lambda row: row.others_cores, ".2f"),
)
_LEGEND = """\
lost: errors of streams that had begun;
µs/tok, ms/req: CPU of the system over all its processes; gen %: the load generator's share of the
CPU used; idle: cores that the systems waiting for their turn used meanwhile"""


def compare(options: Namespace, arguments: Sequence[str], systems: Sequence[System]) -> int:
    """Measure, print and write; the command's exit status."""
    chars = wanted_chars(options, systems[0])
    loads = wanted_loads(options)
    for system in systems:
        warm_up(options, system, chars, max(load.users for load in loads) or WARM_UP_USERS)
    print(report.heading(COLUMNS), flush=True)

    def run(subject: tuple[int, System], load: Load, number: int) -> Row:
        max_tokens, system = subject
        # Every system gets the same prompts in a round; no round repeats another's, or caches would
        # answer.
        seed = zlib.crc32(f"{load.seed}/{load.users}/{max_tokens}".encode())
        maker = maker_for(options, system, chars, seed)
        others = [own for own in systems if own != system]

        async def measured() -> Row:
            one = Run(Batcher(None), HttpEndpoint(maker), load, alike(max_tokens))
            return await measure(number, one, system, others)

        return uvloop.run(measured())

    subjects = [(options.max_tokens, system) for system in systems]
    rows = take_turns(COLUMNS, loads, options.rounds, subjects, run)
    cost_rows: list[Row] = []
    if options.cost_model:
        long_tokens = max(options.max_tokens, 2 * SHORT_TOKENS)
        subjects = [
            (tokens, system) for tokens in (SHORT_TOKENS, long_tokens) for system in systems
        ]
        cost_rows = take_turns(COLUMNS, loads[-1:], options.rounds, subjects, run)
    print(f"{_LEGEND}\n\n{report.summary(COLUMNS, rows)}\n\n{cpu_by_kind(rows)}")
    pairs = [(systems[0].name, peer.name) for peer in systems[1:]]
    found, costs = report.ratios(rows, pairs, MEASURES), cost_model(cost_rows)
    if found:
        print(f"\n{report.ratio_table(found)}")
    if costs:
        print(f"\n{_cost_table(costs)}")
    report.write_document(
        options,
        ["scripts/bench", *arguments],
        rows=rows,
        ratios=found,
        cost_rows=cost_rows,
        costs=costs,
    )
    return 1 if any(row.errors for row in rows + cost_rows) else 0


def wanted_loads(options: Namespace) -> list[Load]:
    """Closed loops with at least one answer for every user, or an open loop."""
    loads = [
        Load(users, window_s=options.duration_s, least=2 * users, seed=str(options.seed))
        for users in options.concurrency
    ]
    if options.rate:
        loads = [replace(loads[0], users=0, rate_per_s=options.rate, least=0)]
    return loads


def cpu_by_kind(rows: Sequence[Row]) -> str:
    """CPU by system and kind of process, over the loads; medians of the rounds."""
    loads, lines = loads_of(rows), list[list[str]]()
    for name in names_of(rows):
        kinds = sorted({kind for row in rows if row.name == name for kind in row.cpu_s})
        for kind in sorted(kinds, key=lambda kind: kind == GENERATOR):
            cells = [_cost_cell(select(rows, name, load), kind) for load in loads]
            lines.append([name, kind, *cells])
    head = ["CPU per token in µs (per request in ms)", "", *(f"load {load}" for load in loads)]
    return report.markdown(head, lines)


def _cost_cell(rows: Sequence[Row], kind: Kind) -> str:
    used = [(row.cpu_s.get(kind, 0.0), row) for row in rows]
    per_token_us = median([cpu_s / row.tokens * 1e6 for cpu_s, row in used if row.tokens])
    per_request_ms = median([cpu_s / row.requests * 1e3 for cpu_s, row in used if row.requests])
    return f"{per_token_us:.0f} ({per_request_ms:.1f})"


@dataclass(frozen=True)
class Cost:
    """CPU of one kind of process: microseconds per token and milliseconds per request."""

    system: str
    kind: Kind
    per_token_us: float
    per_request_ms: float


def cost_model(rows: Sequence[Row]) -> list[Cost]:
    """What a token and a request cost, from runs of two lengths, by system and kind, the sum over a
    system's kinds last: medians over the rounds of ``cpu = fixed + tokens * per_token``, solved for
    the two. Noise can make either slightly negative; it is left so, because clipping would hide how
    noisy the measurement was.
    """
    costs: list[Cost] = []
    for system in names_of(rows):
        mine = [row for row in rows if row.name == system and row.requests > row.errors]
        pairs = [
            (short, long)
            for short in mine
            for long in mine
            if short.round == long.round and _point(short, TOTAL)[0] < _point(long, TOTAL)[0]
        ]
        for kind in [*sorted({kind for row in mine for kind in row.cpu_s}), TOTAL] if pairs else ():
            tokens_us, requests_ms = [], []
            for short, long in pairs:
                (few, few_s), (many, many_s) = _point(short, kind), _point(long, kind)
                per_token_s = (many_s - few_s) / (many - few)
                tokens_us.append(per_token_s * 1e6)
                requests_ms.append((few_s - few * per_token_s) * 1e3)
            per_token_us, per_request_ms = median(tokens_us), median(requests_ms)
            costs.append(Cost(system, kind, round(per_token_us, 1), round(per_request_ms, 3)))
    return costs


def _point(row: Row, kind: Kind) -> tuple[float, float]:
    """Tokens and CPU seconds of a request."""
    cpu_s = row.server_cpu_s if kind == TOTAL else row.cpu_s.get(kind, 0.0)
    return row.tokens / row.requests, cpu_s / row.requests


def _cost_table(found: Iterable[Cost]) -> str:
    lines = [
        [cost.system, cost.kind, f"{cost.per_token_us:.1f}", f"{cost.per_request_ms:.3f}"]
        for cost in found
    ]
    return report.markdown(["system", "kind of process", "µs per token", "ms per request"], lines)
