"""`scripts/bench --batching` against a small server: what is sent when, and what a row says."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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

pytestmark = pytest.mark.nightly  # a tool

_PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="m"} 12.0
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
"""


class _Engine:
    """Streams as many tokens as were asked for, each after ``step_s``; counts those at work."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self.running = self.most_running = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
                await self._answer(json.loads(await reader.readexactly(length)), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _answer(self, body: dict[str, int], writer: asyncio.StreamWriter) -> None:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(body["max_tokens"]):
                await asyncio.sleep(self._step_s)
                _write(writer, {"choices": [{"delta": {"content": "a"}}]})
                await writer.drain()
            usage = {"completion_tokens": body["max_tokens"], "prompt_tokens": 5}
            _write(writer, {"choices": [], "usage": usage})
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        finally:
            self.running -= 1


def _write(writer: asyncio.StreamWriter, event: dict[str, object]) -> None:
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


@asynccontextmanager
async def _serving(engine: _Engine) -> AsyncIterator[int]:
    server = await asyncio.start_server(engine, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def _measure(
    batcher: str, engine: _Engine, *, users: int = 0, rate_per_s: float = 0.0, window_s: float = 0.3
) -> BatchRow:
    (specification,) = parse(batcher)
    pressure = Pressure("load", users, rate_per_s, window_s, timeout_s=60.0, seed="s")
    async with _serving(engine) as port:
        shape = Shape("chat/completions", "m", max_tokens=16, prompt_chars=10)
        maker = RequestMaker(f"http://127.0.0.1:{port}/v1", "k", shape, 1)
        server = Server([os.getpid()])
        ran = await Run(specification, maker, pressure, 5, server).measure()
    return describe(batcher, pressure, 1, ran, EngineGauges(f"http://127.0.0.1:{port}"), 2**20)


@pytest.mark.clock
class TestRuns:
    @pytest.mark.parametrize(
        ("batcher", "most"), [("serial", 1), ("static:3", 3), ("async:4", 4), ("continuous", 6)]
    )
    def test_no_more_reach_the_endpoint_than_the_batcher_lets_through(
        self, batcher: str, most: int
    ) -> None:
        engine = _Engine(0.001)
        row = asyncio.run(_measure(batcher, engine, users=6))
        assert engine.most_running == most
        assert row.errors == 0, row.error_kinds
        assert 0.3 * most < row.in_flight <= most

    def test_a_row_says_how_much_of_a_core_the_server_took(self) -> None:
        """In a window that is long beside the steps in which the system counts CPU time."""
        row = asyncio.run(_measure("continuous", _Engine(0.001), users=6, window_s=2.0))
        assert 0 < row.cores < 2
        assert row.tokens_per_cpu_s > row.tokens_per_s / 2 > 0

    def test_what_the_batcher_kept_waiting_is_unfinished_and_counts_with_its_wait(self) -> None:
        row = asyncio.run(_measure("serial", _Engine(10.0), users=20))
        assert row.unfinished == row.requests == 20
        assert row.end_to_end.p50_ms >= 300, "less than the window for which they waited"
        assert "≥" in line(row)

    def test_what_does_not_end_in_time_is_broken_off_at_the_server_too(self) -> None:
        engine = _Engine(10.0)
        row = asyncio.run(_measure("continuous", engine, users=3, window_s=0.1))
        assert (row.requests, row.unfinished, row.errors) == (3, 3, 0)
        assert row.tokens_per_s == 0

    def test_arrivals_do_not_wait_for_answers(self) -> None:
        engine = _Engine(0.05)
        # Long beside the seconds for which a machine stands still: nothing arrives afterwards.
        row = asyncio.run(_measure("continuous", engine, rate_per_s=40.0, window_s=5.0))
        assert engine.most_running > 10
        assert row.requests > 10


class TestFront:
    def test_a_failure_to_send_reaches_who_waits_and_frees_the_place(self) -> None:
        async def send(job: Job) -> None:
            if job.number == 0:
                raise ValueError("broken")

        async def both() -> bool:
            front = Front(Window(1), send)
            first = asyncio.create_task(front.perform(Job(0, 0.0, 1, 1, True)))
            second = asyncio.create_task(front.perform(Job(1, 0.0, 1, 1, True)))
            with pytest.raises(ValueError, match="broken"):
                await first
            return await second

        assert asyncio.run(both())

    def test_a_front_that_closes_tells_those_who_wait_that_nothing_was_sent(self) -> None:
        async def send(_: Job) -> None:
            await asyncio.Event().wait()

        async def closed() -> list[bool]:
            front = Front(Window(1), send)
            tasks = [asyncio.create_task(front.perform(Job(n, 0.0, 1, 1, True))) for n in range(2)]
            await asyncio.sleep(0)
            await front.close(0.01)
            late = front.perform(Job(2, 0.0, 1, 1, True))
            return await asyncio.wait_for(asyncio.gather(*tasks, late), 60)

        assert asyncio.run(closed()) == [True, False, False]


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
