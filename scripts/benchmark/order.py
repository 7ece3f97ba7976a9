"""The order of work on a real engine: `scripts/bench --order …`. With ``backlog`` more work waits
than the engine can hold; with ``long-among-short`` every slot holds a long generation when short
requests come.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice

from . import interrupts, tables
from .batchers import Batcher, alike, mix
from .client import Exchange, RequestMaker, Shape
from .engine_page import EnginePage, Reading
from .errors import SystemFailed
from .measurement import Row, describe, maker_for, wanted_shape, warm_up
from .options import Options
from .report import write_document
from .run import HttpEndpoint, Load, Ran, Run, put
from .stats import Measure, percentile, ratio
from .systems import System
from .tables import Column

_SHORT_PER_S = 6.0
_LOOK_EVERY_S = 0.02
_ALONE, _BESIDE = "short alone", "short beside long"


@dataclass
class BacklogRow:
    """One round with a backlog: the engine's own figures, and what ended meanwhile."""

    round: int
    load: str
    requests: int
    errors: int
    tokens_per_s: float
    running_p50: float
    waiting_p50: float
    waiting_p99: float
    held_back_p50: float
    """Requests that were sent and had not reached the engine."""
    preemptions: float
    kv_used_p50: float
    kv_used_p10: float
    name: str = "backlog"
    error_kinds: dict[str, int] = field(default_factory=dict)

    @property
    def preemptions_per_request(self) -> float:
        """Of the requests that ended in the round; NaN if none did."""
        return self.preemptions / self.requests if self.requests else math.nan

    @classmethod
    def of(
        cls, number: int, users: int, readings: Sequence[Reading], ended: Sequence[Exchange]
    ) -> "BacklogRow":
        """The row of a round; ``ended``: what ended between the first and the last reading."""
        running, waiting = [one.running for one in readings], [one.waiting for one in readings]
        kv_used = [one.kv_used for one in readings]
        held_back = [users - one.running - one.waiting for one in readings]
        good = [one for one in ended if one.error is None]
        duration_s = readings[-1].at_s - readings[0].at_s
        return cls(
            round=number,
            load=str(users),
            requests=len(good),
            errors=len(ended) - len(good),
            tokens_per_s=round(sum(one.tokens for one in good) / duration_s, 1),
            running_p50=percentile(running, 50),
            waiting_p50=percentile(waiting, 50),
            waiting_p99=round(percentile(waiting, 99), 2),
            held_back_p50=percentile(held_back, 50),
            preemptions=readings[-1].preemptions - readings[0].preemptions,
            kv_used_p50=round(percentile(kv_used, 50), 4),
            kv_used_p10=round(percentile(kv_used, 10), 4),
        )


BACKLOG_COLUMNS = (
    Column("requests", lambda row: row.requests),
    Column("tok/s", lambda row: row.tokens_per_s, spread=True),
    Column("errors", lambda row: row.errors),
    Column("in engine: run", lambda row: row.running_p50, spread=True),
    Column("wait p50", lambda row: row.waiting_p50, spread=True),
    Column("wait p99", lambda row: row.waiting_p99, spread=True),
    Column("held back", lambda row: row.held_back_p50, spread=True),
    Column("preempted", lambda row: row.preemptions),
    Column("per request", lambda row: row.preemptions_per_request, ".2%", spread=True),
    Column("KV p50", lambda row: row.kv_used_p50, ".0%", spread=True),
    Column("KV p10", lambda row: row.kv_used_p10, ".0%", spread=True),
)


async def backlog(
    maker: RequestMaker,
    page: EnginePage,
    users: int,
    seed: str,
    rounds: int,
    duration_s: float,
) -> list[BacklogRow]:
    """``users`` who send their next request as soon as the last one has its answer: the rounds are
    parts of one load without a pause. The ramp before the first counts for none.
    """
    load = Load(users, window_s=rounds * duration_s, grace_s=0.0, after_ramp=True)
    jobs = mix(seed, maker.shape.max_tokens)
    ran = await Run(Batcher(None), HttpEndpoint(maker, page), load, jobs).measure()
    return [_round(ran, number, duration_s) for number in range(1, rounds + 1)]


def _round(ran: Ran, number: int, duration_s: float) -> BacklogRow:
    begins_s = ran.started_s + (number - 1) * duration_s
    within = [one for one in ran.readings if 0 <= one.at_s - begins_s <= duration_s]
    if len(within) < 2:
        raise SystemFailed("the engine's metrics page did not answer")
    first_s, last_s = within[0].at_s, within[-1].at_s
    ended = [one for one in ran.exchanges if first_s < (one.finished_s or 0.0) <= last_s]
    return BacklogRow.of(number, ran.load.users, within, ended)


def backlog_summary(rows: Sequence[BacklogRow]) -> str:
    """Medians of the rounds, and the preemptions of all of them: a median would not show the one
    round in which many were preempted.
    """
    requests = sum(row.requests for row in rows)
    together = sum(row.preemptions for row in rows) / requests if requests else math.nan
    text = tables.summary(BACKLOG_COLUMNS, rows)
    return f"{text}\n\npreemptions per request, all rounds together: {together:.2%}"


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
    warm_up(options, system, shape, options.slots)
    rows: Sequence[BacklogRow] | Sequence[ShortRow]
    if options.order == "backlog":
        page, users = EnginePage(system.pages), max(options.concurrency)
        maker = maker_for(options, system, shape, options.seed)
        times = options.rounds, options.duration_s
        rows = interrupts.run(backlog(maker, page, users, str(options.seed), *times))
        print(backlog_summary(rows))
        wrong = any(row.errors for row in rows)
    else:
        rows = interrupts.run(_long_among_short(options, system, shape))
        wrong = any(row.errors or row.texts_differ for row in rows)
    found = {"order": options.order, "order_rows": [asdict(row) for row in rows]}
    write_document(options.json_path, arguments, found)
    return 1 if wrong else 0


async def _long_among_short(options: Options, system: System, shape: Shape) -> list[ShortRow]:
    rate_per_s = options.rate_per_s or _SHORT_PER_S
    load = Load(rate_per_s=rate_per_s, window_s=options.duration_s, seed=str(options.seed))
    short = maker_for(options, system, shape, options.seed)
    sizes = options.slots, options.long_tokens
    measured = LongAmongShort(
        short, lambda: maker_for(options, system, shape, options.seed + 1), *sizes, load
    )
    print(tables.heading(SHORT_COLUMNS), flush=True)
    rows: list[ShortRow] = []
    async for row in measured.measure(options.rounds):
        rows.append(row)
        print(tables.line(SHORT_COLUMNS, row), flush=True)
    print(f"\n{short_summary(rows, measured.unbroken)}")
    return rows
