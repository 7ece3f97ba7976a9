"""The order of work on a real engine: `scripts/bench --order …`. With ``backlog`` more work waits
than the engine can hold; with ``long-among-short`` every slot holds a long generation when short
requests come.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice

from . import interrupts, tables
from .batchers import Batcher, alike, mix
from .client import Exchange, RequestMaker, Shape
from .engine_page import EnginePage
from .measurement import Row, describe, maker_for, wanted_shape, warm_up
from .options import SLOTS, Options
from .report import write_document
from .run import HttpEndpoint, Load, Run, put
from .stats import Measure, ratio
from .systems import System
from .tables import Column

_SHORT_PER_S = 6.0
_LONG_TOKENS = 3500
_LOOK_EVERY_S = 0.02
_ALONE, _BESIDE = "short alone", "short beside long"


BACKLOG_COLUMNS = (
    Column("requests", lambda row: row.requests),
    Column("tok/s", lambda row: row.tokens_per_s, spread=True),
    Column("errors", lambda row: row.errors),
    Column("in flight", lambda row: row.in_flight, ",.1f"),
    Column("in engine: run", lambda row: row.engine_running, spread=True),
    Column("wait p50", lambda row: row.waiting_p50, spread=True),
    Column("wait p99", lambda row: row.waiting_p99, ",.1f", spread=True),
    Column("preempted", lambda row: row.preemptions),
    Column("per request", lambda row: row.preemptions_per_request, ".2%", spread=True),
    Column("KV p50", lambda row: row.kv_used_p50, ".0%", spread=True),
)


async def backlog(
    maker: RequestMaker, page: EnginePage, users: int, window_s: float, number: int
) -> Row:
    """``users`` who send their next request as soon as the last one has its answer; the ramp does
    not count.
    """
    load = Load(users, window_s=window_s, grace_s=0.0, after_ramp=True)
    jobs = mix(str(number), maker.shape.max_tokens)
    run = Run(Batcher(None), HttpEndpoint(maker, page), load, jobs)
    return describe("backlog", number, await run.measure())


def text_of(body: bytes | bytearray | None) -> tuple[str, str]:
    """The text and the finish reason of a stream of chat chunks."""
    text, finish_reason = "", ""
    for line in (body or b"").split(b"\n"):
        chunk = json.loads(line[len(b"data: ") :]) if line.startswith(b"data: {") else {}
        for choice in chunk.get("choices") or []:
            text += choice["delta"].get("content") or ""
            finish_reason = choice.get("finish_reason") or finish_reason
    return text, finish_reason


@dataclass
class ShortRow(Row):
    """One round of short requests, alone or beside long generations."""

    long_s: float = math.nan
    """How long the slowest of the long generations took."""
    long_gap_s: float = math.nan
    """The longest time in which one of them wrote nothing."""
    texts_differ: int = 0


SHORT_COLUMNS = (
    Column("requests", lambda row: row.requests),
    Column("errors", lambda row: row.errors),
    Column("TTFT p50 ms", lambda row: row.ttft.p50_ms, spread=True),
    Column("p99", lambda row: row.ttft.p99_ms, spread=True),
    Column("end-to-end p50 ms", lambda row: row.end_to_end.p50_ms, spread=True),
    Column("p99", lambda row: row.end_to_end.p99_ms, spread=True),
    Column("long s", lambda row: row.long_s, ".1f", spread=True),
    Column("long gap s", lambda row: row.long_gap_s, ".1f", spread=True),
    Column("texts differ", lambda row: row.texts_differ),
)


class LongAmongShort:
    """Short requests of ``load``, alone and beside ``slots`` long generations, in turns; the same
    long requests in each, whose texts are known from before. The makers are made anew for each.
    """

    def __init__(
        self,
        short: RequestMaker,
        long: Callable[[], RequestMaker],
        slots: int,
        long_tokens: int,
        load: Load,
        requests: int | None = None,
    ) -> None:
        self._short = short
        self._long = long
        self._slots = slots
        self._long_tokens = long_tokens
        self._load = load
        self._requests = requests
        self.unbroken: list[Exchange] = []

    async def measure(self, rounds: int) -> AsyncIterator[ShortRow]:
        """First the long ones with nothing beside them: nobody waits, so nothing interrupts them.
        Then, round by round, the short ones alone and beside the long ones.
        """
        self.unbroken = (await self._long_ones().measure()).exchanges
        for number in range(1, rounds + 1):
            yield await self._short_ones(_ALONE, number)
            run = self._long_ones()
            async with asyncio.TaskGroup() as group:
                long_ones = group.create_task(run.measure())
                # Nothing tells when each has its first token, or has ended without one.
                while not self._all_begun(run.exchanges):
                    await asyncio.sleep(_LOOK_EVERY_S)
                row = await self._short_ones(_BESIDE, number)
            yield with_long(row, long_ones.result().exchanges, self.unbroken)

    def _long_ones(self) -> Run:
        load = Load(users=self._slots, window_s=None)
        jobs = islice(alike(self._long_tokens), self._slots)
        return Run(Batcher(None), HttpEndpoint(self._long(), keep=True), load, jobs)

    def _all_begun(self, exchanges: Sequence[Exchange]) -> bool:
        begun = [one for one in exchanges if one.first_token_s or one.finished_s]
        return len(begun) == self._slots

    async def _short_ones(self, name: str, number: int) -> ShortRow:
        """The same arrivals in both turns of a round."""
        load = replace(self._load, seed=f"{self._load.seed}/{number}")
        row = describe(name, number, await put(self._short, load, self._requests))
        return ShortRow(**vars(row))


def with_long(row: ShortRow, answers: Sequence[Exchange], unbroken: Sequence[Exchange]) -> ShortRow:
    """``row`` with what the long generations beside it did. A text that did not end, or with
    another finish reason, is one that differs.
    """
    same = [
        answer.error is None and text_of(answer.body) == text_of(expected.body)
        for answer, expected in zip(answers, unbroken, strict=True)
    ]
    wrong = {f"long: {answer.error}": 1 for answer in answers if answer.error is not None}
    return replace(
        row,
        error_kinds=row.error_kinds | wrong,
        long_s=round(max(map(_took_s, answers)), 3),
        long_gap_s=round(max(max(answer.gaps_s, default=0.0) for answer in answers), 3),
        texts_differ=same.count(False),
    )


def _took_s(exchange: Exchange) -> float:
    return (exchange.finished_s or exchange.started_s) - exchange.started_s


def short_summary(rows: Sequence[ShortRow], unbroken: Sequence[Exchange]) -> str:
    """Medians of the rounds, what the long ones cost the short ones, and the texts."""
    texts = len(unbroken) * sum(row.name == _BESIDE for row in rows)
    measures: dict[str, Measure] = {
        "end-to-end p50": lambda row: row.end_to_end.p50_ms,
        "end-to-end p99": lambda row: row.end_to_end.p99_ms,
        "TTFT p99": lambda row: row.ttft.p99_ms,
    }
    found = [ratio(rows, rows[0].load, _BESIDE, _ALONE, one) for one in measures.items()]
    return (
        f"{tables.summary(SHORT_COLUMNS, rows)}\n\n"
        f"{tables.ratios(one for one in found if one is not None)}\n\n"
        f"a long generation with nothing beside it: {max(map(_took_s, unbroken)):.1f} s\n"
        f"long texts that are not the unbroken one: {sum(row.texts_differ for row in rows)} of "
        f"{texts}"
    )


def measure_order(options: Options, arguments: Sequence[str], system: System) -> int:
    """Measure what ``--order`` names on ``system``; the command's exit status."""
    shape = wanted_shape(options, system)
    warm_up(options, system, shape, SLOTS)
    run = _backlog if options.order == "backlog" else _long_among_short
    rows = interrupts.run(run(options, system, shape))
    found = {"order": options.order, "order_rows": [asdict(row) for row in rows]}
    write_document(options.json_path, arguments, found)
    return 1 if any(row.errors or getattr(row, "texts_differ", 0) for row in rows) else 0


async def _backlog(options: Options, system: System, shape: Shape) -> Sequence[Row]:
    page, users = EnginePage(system.pages), max(options.concurrency)
    print(tables.heading(BACKLOG_COLUMNS), flush=True)
    rows: list[Row] = []
    for number in range(1, options.rounds + 1):
        maker = maker_for(options, system, shape, options.seed + number)
        rows.append(await backlog(maker, page, users, options.duration_s, number))
        print(tables.line(BACKLOG_COLUMNS, rows[-1]), flush=True)
    print(f"\n{tables.summary(BACKLOG_COLUMNS, rows)}")
    return rows


async def _long_among_short(options: Options, system: System, shape: Shape) -> Sequence[Row]:
    rate_per_s = options.rate_per_s or _SHORT_PER_S
    load = Load(rate_per_s=rate_per_s, window_s=options.duration_s, seed=str(options.seed))
    short = maker_for(options, system, shape, options.seed)
    measured = LongAmongShort(
        short,
        lambda: maker_for(options, system, shape, options.seed + 1),
        *(SLOTS, _LONG_TOKENS, load),
    )
    print(tables.heading(SHORT_COLUMNS), flush=True)
    rows: list[ShortRow] = []
    async for row in measured.measure(options.rounds):
        rows.append(row)
        print(tables.line(SHORT_COLUMNS, row), flush=True)
    print(f"\n{short_summary(rows, measured.unbroken)}")
    return rows
