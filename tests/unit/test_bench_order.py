"""`scripts/bench --order` against a small server: what is sent when, and what the rows say."""

import asyncio
import math
from array import array
from collections.abc import Callable
from itertools import islice

import pytest

from scripts.benchmark.batchers import alike
from scripts.benchmark.client import Exchange
from scripts.benchmark.engine_page import EnginePage, Reading, parse_page
from scripts.benchmark.errors import SystemFailed
from scripts.benchmark.measurement import Row, describe
from scripts.benchmark.order import (
    BACKLOG_COLUMNS,
    SHORT_COLUMNS,
    LongAmongShort,
    ShortRow,
    backlog,
    short_summary,
    with_long,
)
from scripts.benchmark.run import Load, Ran, Served
from scripts.benchmark.tables import line, summary
from tests.http_server import serving
from tests.unit.bench_engine import Engine, maker

pytestmark = pytest.mark.nightly  # a tool

_LONG_TOKENS = 40


def _engine(slots: int, word: Callable[[int], str] = lambda _: "a") -> Engine:
    """An engine where a long answer begins later than short ones that come now."""
    return Engine(0.002, begin_s=0.01, slots=slots, word=word)


class TestEnginePage:
    def test_the_values_of_all_engines_are_added(self) -> None:
        page = (
            'vllm:num_requests_running{engine="0"} 12.0\nvllm:num_requests_running{engine="1"} 1\n'
            'vllm:num_requests_waiting{engine="0"} 3.0\n'
            'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0\n'
            'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:num_preemptions_total 7.0\n'
        )
        assert parse_page(page, 1.0) == Reading(1.0, 13.0, 3.0, 0.25, 7.0)

    def test_a_page_without_an_engine_has_no_reading(self) -> None:
        assert parse_page("hermes_requests 1\n", 1.0) is None
        with pytest.raises(SystemFailed, match=r"http://127\.0\.0\.1:1/metrics"):
            EnginePage(["http://127.0.0.1:1/metrics"])


class TestBacklog:
    @staticmethod
    def _row(ended: int, readings: list[Reading]) -> Row:
        load, seconds = Load(users=32), readings[-1].at_s - readings[0].at_s
        served = [Served(job, asyncio.Event()) for job in islice(alike(10), ended)]
        for one in served:
            one.exchange = Exchange(0.0, events=10, tokens=10)
            one.ended.set()
        return describe("backlog", 1, Ran(load, served, readings, 0.0, seconds, 200, 26.0, 0.0))

    def test_a_row_says_what_the_engine_did_between_its_readings(self) -> None:
        row = self._row(20, [Reading(float(at), 4.0, at, at / 10, 5.0 * at) for at in range(1, 4)])
        assert (row.requests, row.errors, row.tokens_per_s) == (20, 0, 100.0)
        assert (row.engine_running, row.waiting_p50, row.in_flight) == (4, 2, 26)
        assert row.waiting_p99 == pytest.approx(2.98)
        assert (row.preemptions, row.preemptions_per_request) == (10.0, 0.5)
        assert (row.kv_used_p50, row.kv_used) == (0.2, 0.3)
        row = self._row(0, [Reading(0.0, 1, 0, 0, 0), Reading(1.0, 1, 0, 0, 2)])
        assert math.isnan(row.preemptions_per_request)
        assert line(BACKLOG_COLUMNS, row).split()[-2] == "–"

    def test_preemptions_of_one_round_among_many_are_not_hidden_by_the_median(self) -> None:
        rows = [
            self._row(20, [Reading(0.0, 1, 0, 0, 0), Reading(1.0, 1, 0, 0, many)])
            for many in (0, 0, 6)
        ]
        assert "| 0.00% (0.00%–30.00%) |" in summary(BACKLOG_COLUMNS, rows)

    @pytest.mark.clock
    async def test_as_many_requests_are_under_way_as_there_are_users(self) -> None:
        engine = _engine(slots=2)
        with serving(engine) as server:
            page = await asyncio.to_thread(
                EnginePage, [f"{server.url}/nothing", f"{server.url}/metrics"]
            )
            row = await backlog(maker(server.url, 32), page, 6, 0.5, 1)
        assert (row.engine_running, row.waiting_p50) == (2, 4)
        assert (row.errors, row.requests - row.unfinished > 6) == (0, True)
        # The small engine calls each beginning a preemption.
        assert len(engine.begun) - row.preemptions >= 6, "the ramp counts for no round"


class TestLongAmongShort:
    async def _measure(self, engine: Engine) -> tuple[list[ShortRow], LongAmongShort]:
        with serving(engine) as server:
            load, url = Load(rate_per_s=50.0, window_s=0.5), server.url
            short, sizes = maker(url, 3), (2, _LONG_TOKENS)
            measured = LongAmongShort(short, lambda: maker(url, 3), *sizes, load, requests=5)
            return [row async for row in measured.measure(2)], measured

    @pytest.mark.clock
    async def test_short_ones_come_alone_and_after_every_long_one_has_begun(self) -> None:
        engine = _engine(slots=100)
        rows, measured = await self._measure(engine)
        assert [(row.round, row.name) for row in rows] == [
            *[(1, "short alone"), (1, "short beside long")],
            *[(2, "short alone"), (2, "short beside long")],
        ]
        short, long = [3] * 5, [_LONG_TOKENS] * 2
        assert engine.begun == [*long, *(short + long + short) * 2]
        assert all(row.requests == 5 and row.errors == row.texts_differ == 0 for row in rows)
        assert [row.long_s > 0 for row in rows] == [False, True, False, True]
        text = short_summary(rows, measured.unbroken)
        assert "long texts that are not the unbroken one: 0 of 4" in text
        assert text.count("| short beside long | short alone |") == 3

    @pytest.mark.clock
    async def test_a_text_with_a_seam_is_found(self) -> None:
        """The second of the long ones in the second round gets another text than before."""
        seam = 2 + 5 + 2 + 5 + 5 + 2
        engine = _engine(slots=100, word=lambda number: "b" if number == seam else "a")
        rows, measured = await self._measure(engine)
        assert [row.texts_differ for row in rows] == [0, 0, 0, 1]
        assert "1 of 4" in short_summary(rows, measured.unbroken)

    def test_a_long_one_that_fails_is_told_and_its_text_differs(self) -> None:
        ran = Ran(Load(users=1), [], [], 0.0, 1.0, 0, 0.0, 0.0)
        short = ShortRow(**vars(describe("short beside long", 1, ran)))
        failed = Exchange(1.0, finished_s=10.0, gaps_s=array("d", [1.0]), error="HTTP 500")
        row = with_long(short, [failed], [Exchange(1.0, finished_s=10.0)])
        first, second = line(SHORT_COLUMNS, row).splitlines()
        assert first.split()[-3:] == ["9.0", "1.0", "1"]
        assert second.strip() == "1 × long: HTTP 500"
