"""`scripts/bench --order`: put the load on, print, write."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from urllib.parse import urlsplit

from .. import interrupts
from ..load import Load
from ..options import Options
from ..prompts import RequestMaker, Shape
from ..report import write_document
from ..rounds import wanted_shape, warm_up
from ..systems import System
from . import table
from .backlog import Backlog
from .engine_page import EnginePage
from .figures import BacklogRow, ShortRow
from .long_among_short import LongAmongShort, Turns

_SHORT_PER_S = 6.0
_PORTS_OF_PROCESSES = 8


def measure_order(options: Options, arguments: Sequence[str], system: System) -> int:
    """Measure what ``--order`` names on ``system``; the command's exit status."""
    shape = wanted_shape(options, system)
    warm_up(replace(options, concurrency=(options.slots,)), system, shape)
    rows: Sequence[BacklogRow] | Sequence[ShortRow]
    if options.order == "backlog":
        rows = interrupts.run(_backlog(options, system, shape))
        wrong = any(row.errors for row in rows)
    else:
        rows = interrupts.run(_long_among_short(options, system, shape))
        wrong = any(row.errors or row.texts_differ for row in rows)
    if options.json_path is not None:
        found = {"order": options.order, "order_rows": [asdict(row) for row in rows]}
        write_document(options.json_path, arguments, found)
        print(f"wrote {options.json_path}", file=sys.stderr)
    return 1 if wrong else 0


async def _backlog(options: Options, system: System, shape: Shape) -> list[BacklogRow]:
    page = EnginePage(_pages(options, system))
    maker = RequestMaker(system.url, options.api_key, shape, options.seed)
    backlog = Backlog(maker, page, max(options.concurrency), str(options.seed), options.timeout_s)
    print(table.BACKLOG_HEADING, flush=True)
    rows: list[BacklogRow] = []
    async for row in backlog.measure(options.rounds, options.duration_s, options.settle_s):
        rows.append(row)
        print(table.backlog_line(row), flush=True)
    print(f"\n{table.backlog_summary(rows)}")
    return rows


async def _long_among_short(options: Options, system: System, shape: Shape) -> list[ShortRow]:
    load = Load(
        rate_per_s=options.rate_per_s or _SHORT_PER_S,
        duration_s=options.duration_s,
        timeout_s=options.timeout_s,
        seed=options.seed,
    )
    turns = Turns(
        system.url, options.api_key, options.slots, options.long_tokens, options.rounds, load
    )
    short = RequestMaker(system.url, options.api_key, shape, options.seed)
    long = RequestMaker(system.url, options.api_key, shape, options.seed + 1)
    measured = LongAmongShort(short, long, turns)
    print(table.SHORT_HEADING, flush=True)
    rows: list[ShortRow] = []
    async for row in measured.measure():
        rows.append(row)
        print(table.short_line(row), flush=True)
    print(f"\n{table.short_summary(rows, measured.unbroken)}")
    return rows


def _pages(options: Options, system: System) -> list[str]:
    """Where the engine's metrics may be: every process of the service takes the next free port."""
    if options.metrics_url:
        return [options.metrics_url]
    if system.process_port:
        ports = range(system.process_port, system.process_port + _PORTS_OF_PROCESSES)
        return [f"http://127.0.0.1:{port}/metrics" for port in ports]
    parts = urlsplit(system.url)
    return [f"{parts.scheme}://{parts.netloc}/metrics"]
