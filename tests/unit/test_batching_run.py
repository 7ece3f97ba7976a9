"""`scripts/bench --batching` against a small server: what is sent when, and what a row says."""

import asyncio
import os

import pytest

from scripts.benchmark.batching.engine_gauges import EngineGauges
from scripts.benchmark.batching.front import Front
from scripts.benchmark.batching.job import Job
from scripts.benchmark.batching.row import BatchRow, describe
from scripts.benchmark.batching.run import Pressure, Run
from scripts.benchmark.batching.server import Server
from scripts.benchmark.batching.specification import parse
from scripts.benchmark.batching.summary import ratios
from scripts.benchmark.batching.table import line, summary
from scripts.benchmark.batching.window import Window
from scripts.benchmark.measurement import Latency
from scripts.benchmark.options import parse as parse_options
from scripts.benchmark.prompts import RequestMaker, Shape
from tests.http_server import serving
from tests.unit.bench_engine import Engine
from tests.waiting import eventually

pytestmark = pytest.mark.nightly  # a tool

_PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="m"} 12.0
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
"""


async def _measure(
    batcher: str, engine: Engine, *, users: int = 0, rate_per_s: float = 0.0, window_s: float = 0.3
) -> BatchRow:
    (specification,) = parse(batcher)
    pressure = Pressure("load", users, rate_per_s, window_s, timeout_s=60.0, seed="s")
    with serving(engine) as server:
        shape = Shape("chat/completions", "m", max_tokens=16, prompt_chars=10)
        maker = RequestMaker(f"{server.url}/v1", "k", shape, 1)
        ran = await Run(specification, maker, pressure, 5, Server([os.getpid()])).measure()
    return describe(batcher, pressure, 1, ran, EngineGauges(server.url), 2**20)


@pytest.mark.clock
class TestRuns:
    @pytest.mark.parametrize(
        ("batcher", "most"), [("serial", 1), ("static:3", 3), ("async:4", 4), ("continuous", 6)]
    )
    async def test_no_more_reach_the_endpoint_than_the_batcher_lets_through(
        self, batcher: str, most: int
    ) -> None:
        engine = Engine(0.001)
        row = await _measure(batcher, engine, users=6)
        assert engine.most_running == most
        assert row.errors == 0, row.error_kinds
        assert 0.3 * most < row.in_flight <= most

    async def test_a_row_says_how_much_of_a_core_the_server_took(self) -> None:
        """In a window that is long beside the steps in which the system counts CPU time."""
        row = await _measure("continuous", Engine(0.001), users=6, window_s=2.0)
        assert 0 < row.cores < 2
        assert row.tokens_per_cpu_s > row.tokens_per_s / 2 > 0

    async def test_what_the_batcher_kept_waiting_is_unfinished_and_counts_with_its_wait(
        self,
    ) -> None:
        row = await _measure("serial", Engine(10.0), users=20)
        assert row.unfinished == row.requests == 20
        assert row.end_to_end.p50_ms >= 300, "less than the window for which they waited"
        assert "≥" in line(row)

    async def test_what_does_not_end_in_time_is_broken_off_at_the_server_too(self) -> None:
        engine = Engine(1000.0)
        row = await _measure("continuous", engine, users=3, window_s=0.1)
        assert (row.requests, row.unfinished, row.errors) == (3, 3, 0)
        assert row.tokens_per_s == 0
        await eventually(lambda: engine.running == 0)

    async def test_arrivals_do_not_wait_for_answers(self) -> None:
        engine = Engine(0.05)
        # Long beside the seconds for which a machine stands still: nothing arrives afterwards.
        row = await _measure("continuous", engine, rate_per_s=40.0, window_s=5.0)
        assert engine.most_running > 10
        assert row.requests > 10


class TestFront:
    async def test_a_failure_to_send_reaches_who_waits_and_frees_the_place(self) -> None:
        async def send(job: Job) -> None:
            if job.number == 0:
                raise ValueError("broken")

        front = Front(Window(1), send)
        first = asyncio.create_task(front.perform(Job(0, 0.0, 1, 1, True)))
        second = asyncio.create_task(front.perform(Job(1, 0.0, 1, 1, True)))
        with pytest.raises(ValueError, match="broken"):
            await first
        assert await second

    async def test_a_front_that_closes_tells_those_who_wait_that_nothing_was_sent(self) -> None:
        async def send(_: Job) -> None:
            await asyncio.Event().wait()

        front = Front(Window(1), send)
        tasks = [asyncio.create_task(front.perform(Job(n, 0.0, 1, 1, True))) for n in range(2)]
        await asyncio.sleep(0)
        await front.close(0.01)
        late = front.perform(Job(2, 0.0, 1, 1, True))
        sent = await asyncio.wait_for(asyncio.gather(*tasks, late), 60)
        assert sent == [True, False, False]


def test_the_gauges_of_the_engine_are_found_on_its_page() -> None:
    gauges = EngineGauges("http://h:1/v1")
    assert gauges.take(_PAGE)
    assert (gauges.most_running, gauges.most_waiting, gauges.most_kv_used) == (12.0, 3.0, 0.25)
    assert not gauges.take("another_metric 1\n")


def _row(batcher: str, round_number: int, tokens_per_s: float) -> BatchRow:
    none = Latency(1.0, 2.0)
    rest: list[float] = [1.0, 4.0, *[0.0] * 4, 0.5, *[0.0] * 3]
    return BatchRow(
        *(batcher, "8", round_number, 10, 0, 0, {}, 1.0, tokens_per_s, none, none, none), *rest
    )


class TestSummary:
    def test_ratios_are_taken_round_by_round_against_the_best_of_each_kind(self) -> None:
        speeds = {
            **{"serial": 10.0, "static:4": 40.0, "async:8": 50.0, "async:16": 60.0},
            **{"continuous": 80.0, "tuned": 57.0, "hybrid:64": 90.0},
        }
        rows = [
            _row(name, number, speed * number)
            for name, speed in speeds.items()
            for number in (1, 2, 3)
        ]
        found = {(one.ours, one.theirs): one.spread for one in ratios(rows)}
        assert found["continuous", "serial"].median == 8.0
        assert found["tuned", "async:16"].median == 0.95
        assert found["hybrid:64", "async:16"].low == 1.5
        assert ("tuned", "async:8") not in found
        assert "| 8 | continuous | serial | 8.00 (8.00–8.00) | 8.00 (8.00–8.00) |" in summary(rows)


class TestCommandLine:
    def test_batchers_need_one_system(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert len(parse_options(["--url", "http://h/v1", "--batching"]).batching) == 7
        with pytest.raises(SystemExit):
            parse_options(["--serve", "--against", "bare-vllm", "--batching"])
        assert "in front of one system" in capsys.readouterr().err

    def test_an_unknown_batcher_is_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            parse_options(["--url", "http://h/v1", "--batching", "serial,magic"])
        assert "'magic' is no batcher" in capsys.readouterr().err

    def test_a_load_in_percent_needs_batchers(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            parse_options(["--url", "http://h/v1", "--load-percent", "10"])
        assert "needs --batching" in capsys.readouterr().err
