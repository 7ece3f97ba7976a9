"""`scripts/bench --long-among-short`: what short requests wait for while every slot of the engine
holds a long generation.
"""

import asyncio
import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import uvloop

from . import tables
from .batchers import Batcher, alike
from .client import RequestMaker
from .measurement import Row, describe, maker_for, wanted_shape, warm_up
from .options import SLOTS
from .report import write_document
from .run import HttpEndpoint, Load, Run, put
from .stats import ratios
from .systems import System
from .tables import Column

_SHORT_PER_S = 6.0
_LONG_TOKENS = 3500
_LOOK_EVERY_S = 0.02
_ALONE, _BESIDE = "short alone", "short beside long"


@dataclass
class ShortRow(Row):
    """One round of short requests, alone or beside long generations."""

    long_s: float = math.nan
    """How long the slowest of the long generations took."""


COLUMNS = (
    Column("requests", lambda row: row.requests),
    Column("errors", lambda row: row.errors),
    Column("TTFT p50 ms", lambda row: row.ttft.p50_ms, spread=True),
    Column("p99", lambda row: row.ttft.p99_ms, spread=True),
    Column("end-to-end p50 ms", lambda row: row.end_to_end.p50_ms, spread=True),
    Column("p99", lambda row: row.end_to_end.p99_ms, spread=True),
    Column("long s", lambda row: row.long_s, ".1f", spread=True),
)
MEASURES = {
    "end-to-end p50": lambda row: row.end_to_end.p50_ms,
    "end-to-end p99": lambda row: row.end_to_end.p99_ms,
    "TTFT p99": lambda row: row.ttft.p99_ms,
}


async def measure_round(
    number: int,
    short: RequestMaker,
    long: RequestMaker,
    load: Load,
    slots: int = SLOTS,
    long_tokens: int = _LONG_TOKENS,
) -> list[ShortRow]:
    """Short requests of ``load`` alone, and the same once each of ``slots`` long generations has
    begun.
    """

    async def short_ones(name: str) -> ShortRow:
        return ShortRow(**vars(describe(name, number, await put(short, load))))

    alone = await short_ones(_ALONE)
    jobs = islice(alike(long_tokens), slots)
    run = Run(Batcher(None), HttpEndpoint(long), Load(users=slots, window_s=None), jobs)
    async with asyncio.TaskGroup() as group:
        long_ones = group.create_task(run.measure())
        # Nothing tells when each has its first token, or has ended without one.
        while (
            sum(bool(one.first_token_s or one.finished_s) for one in run.exchanges.values()) < slots
        ):
            await asyncio.sleep(_LOOK_EVERY_S)
        beside = await short_ones(_BESIDE)
    answers = long_ones.result().exchanges
    beside.long_s = max((one.finished_s or math.nan) - one.job.arrived_s for one in answers)
    for error in (one.error for one in answers if one.error is not None):
        beside.error_kinds[f"long: {error}"] = 1
        beside.errors += 1
    return [alone, beside]


def measure_long_among_short(options: Namespace, arguments: Sequence[str], system: System) -> int:
    """Measure it round by round on ``system``; the command's exit status."""
    shape = wanted_shape(options, system)
    warm_up(options, system, shape, SLOTS)
    short, long = (maker_for(options, system, shape, options.seed + more) for more in (0, 1))
    load = Load(rate_per_s=options.rate or _SHORT_PER_S, window_s=options.duration_s)
    print(tables.heading(COLUMNS), flush=True)
    rows: list[ShortRow] = []
    for number in range(1, options.rounds + 1):
        # The same arrivals in both turns of a round.
        seeded = replace(load, seed=f"{options.seed}/{number}")
        rows += uvloop.run(measure_round(number, short, long, seeded))
        for row in rows[-2:]:
            print(tables.line(COLUMNS, row), flush=True)
    found = ratios(rows, [(_BESIDE, _ALONE)], MEASURES)
    print(f"\n{tables.summary(COLUMNS, rows)}\n\n{tables.ratio_table(found)}")
    write_document(options, ["scripts/bench", *arguments], rows=rows)
    return 1 if any(row.errors for row in rows) else 0
