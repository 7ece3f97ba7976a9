"""`scripts/bench --long-among-short`: what short requests wait for while every slot of the engine
holds a long generation.
"""

import asyncio
import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import uvloop

from .batchers import Batcher, alike
from .measurement import OF_REQUESTS, Row, describe, maker_for, wanted_chars, warm_up
from .options import SLOTS
from .report import Column, heading, line, ratio_table, ratios, summary, write_document
from .run import HttpEndpoint, Load, RequestMaker, Run, put
from .systems import System

_SHORT_PER_S = 6.0
_LONG_TOKENS = 3500
_LOOK_EVERY_S = 0.02
_ALONE, _BESIDE = "short alone", "short beside long"


COLUMNS = (
    *OF_REQUESTS,
    Column("long s", lambda row: row.long_s, ".1f", spread=True),
)
MEASURES = {
    "end-to-end p50": lambda row: row.end_to_end.p50_ms,
    "end-to-end p99": lambda row: row.end_to_end.p99_ms,
    "TTFT p99": lambda row: row.ttft.p99_ms,
}


async def measure_round(
    number: int, short: RequestMaker, long: RequestMaker, load: Load, max_tokens: int
) -> list[Row]:
    """Short requests of ``load`` alone, and the same once each long generation has begun."""

    async def short_ones(name: str) -> Row:
        return describe(name, number, await put(short, load, max_tokens))

    alone = await short_ones(_ALONE)
    jobs = islice(alike(_LONG_TOKENS), SLOTS)
    run = Run(Batcher(None), HttpEndpoint(long), Load(users=SLOTS, window_s=None), jobs)
    async with asyncio.TaskGroup() as group:
        long_ones = group.create_task(run.measure())
        # Nothing tells when each has its first token, or has ended without one.
        while sum(bool(one.events or one.finished_s) for one in run.exchanges.values()) < SLOTS:
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
    chars = wanted_chars(options, system)
    warm_up(options, system, chars, SLOTS)
    short, long = (maker_for(options, system, chars, options.seed + more) for more in (0, 1))
    load = Load(rate_per_s=options.rate or _SHORT_PER_S, window_s=options.duration_s)
    print(heading(COLUMNS), flush=True)
    rows: list[Row] = []
    for number in range(1, options.rounds + 1):
        # The same arrivals in both turns of a round.
        seeded = replace(load, seed=f"{options.seed}/{number}")
        rows += uvloop.run(measure_round(number, short, long, seeded, options.max_tokens))
        for row in rows[-2:]:
            print(line(COLUMNS, row), flush=True)
    found = ratios(rows, [(_BESIDE, _ALONE)], MEASURES)
    print(f"\n{summary(COLUMNS, rows)}\n\n{ratio_table(found)}")
    write_document(options, ["scripts/bench", *arguments], rows=rows)
    return 1 if any(row.errors for row in rows) else 0
