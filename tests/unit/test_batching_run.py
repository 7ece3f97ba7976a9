"""`scripts/bench --batching` against a small server: what is sent when, and what a row says."""

import asyncio
from dataclasses import fields

import pytest

from scripts.benchmark.batchers import Batcher, Job, alike, mix, parse
from scripts.benchmark.batching import COLUMNS, ratios
from scripts.benchmark.client import Exchange, RequestMaker, Shape
from scripts.benchmark.measurement import Row, describe
from scripts.benchmark.run import Endpoint, HttpEndpoint, Load, Run
from scripts.benchmark.stats import Latency
from scripts.benchmark.tables import line, summary
from scripts.benchmark.tables import ratios as ratios_table
from tests.http_server import serving
from tests.unit.bench_engine import Engine
from tests.waiting import eventually

pytestmark = pytest.mark.nightly  # a tool


async def _measure(
    batcher: str, engine: Engine, *, users: int = 0, rate_per_s: float = 0.0, window_s: float = 0.3
) -> Row:
    (specification,) = parse(batcher)
    load = Load(users, rate_per_s, window_s, grace_s=window_s, seed="s", label="load")
    with serving(engine) as server:
        maker = RequestMaker(f"{server.url}/v1", "k", Shape("m", 16, prompt_chars=10), 1)
        made = specification.make(users or None)
        ran = await Run(made, HttpEndpoint(maker), load, mix("s", 16, 5)).measure()
    return describe(batcher, 1, ran)


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

    async def test_what_the_batcher_kept_waiting_is_unfinished_and_counts_with_its_wait(
        self,
    ) -> None:
        row = await _measure("serial", Engine(10.0), users=20)
        assert row.unfinished == row.requests == 20
        assert row.end_to_end.p50_ms >= 300, "less than the window for which they waited"
        assert "≥" in line(COLUMNS, row)

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


class _Failing(Endpoint):
    async def answer(self, job: Job, exchange: Exchange) -> None:
        raise ValueError("broken")


class _Silent(Endpoint):
    async def answer(self, job: Job, exchange: Exchange) -> None:
        await asyncio.Event().wait()


class TestEnds:
    async def test_a_failure_to_send_ends_the_run(self) -> None:
        run = Run(Batcher(1), _Failing(), Load(users=2, window_s=60.0), alike(1))
        with pytest.raises(ExceptionGroup) as failed:
            await asyncio.wait_for(run.measure(), 60)
        assert str(failed.value.exceptions[0]) == "broken"

    async def test_a_run_that_ends_tells_what_was_not_sent_from_what_was_broken_off(self) -> None:
        load = Load(users=2, window_s=0.01, grace_s=0.01)
        ran = await asyncio.wait_for(Run(Batcher(1), _Silent(), load, alike(1)).measure(), 60)
        assert [one.exchange is not None for one in ran.served] == [True, False]
        assert not any(one.ended.is_set() for one in ran.served)


def _row(name: str, round_number: int, tokens_per_s: float) -> Row:
    values: dict[str, object] = {field.name: 0.0 for field in fields(Row)} | {
        **{"name": name, "load": "8", "round": round_number, "tokens_per_s": tokens_per_s},
        **{"error_kinds": {}, "end_to_end": Latency(1.0, 2.0), "interactive": Latency(1.0, 2.0)},
    }
    return Row(**values)  # type: ignore[arg-type]


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
        said = ratios_table(ratios(rows))
        assert "| 8 | continuous | serial | tokens/s | 8.00 (8.00–8.00) |" in said
        assert "| 8 | continuous | 0.0 | 160 (80–240) | 1 | 2 |" in summary(COLUMNS, rows)
