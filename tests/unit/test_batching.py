"""`scripts/bench --batching`: what each batcher starts and when, what the batchers reach in front
of a model of the engine (docs/performance.md has the figures), and what a row says of a real run.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.benchmark.__main__ import main
from scripts.benchmark.batchers import (
    DEFAULT,
    LARGEST,
    LOOK_EVERY_S,
    SMALLEST,
    Batcher,
    Batches,
    Hybrid,
    Job,
    Split,
    Tuned,
    alike,
    mix,
    parse,
)
from scripts.benchmark.batching import COLUMNS, ratios, virtually
from scripts.benchmark.client import Exchange
from scripts.benchmark.measurement import Row, describe
from scripts.benchmark.run import Endpoint, HttpEndpoint, Load, Occupancy, Run
from scripts.benchmark.tables import line, summary
from scripts.benchmark.tables import ratios as ratios_table
from scripts.simulation.engines import load_engine
from tests.http_server import serving
from tests.tables import each
from tests.unit.bench_engine import Engine, maker, row
from tests.waiting import eventually

pytestmark = pytest.mark.nightly  # a tool


def _play(batcher: Batcher, jobs: Sequence[Job]) -> dict[int, float]:
    """When each job started; one token takes a second, whatever else runs."""
    events: list[tuple[float, int, int, Job | None]] = []
    for order, arriving in enumerate(jobs):
        heappush(events, (arriving.arrived_s, 1, order, arriving))
    started: dict[int, float] = {}
    while events:
        now_s, kind, _, job = heappop(events)
        if kind == 0 and job is not None:
            batcher.ended(job)
        elif job is not None:
            batcher.add(job)
        for one in batcher.next(now_s):
            assert one.number not in started, "started twice"
            started[one.number] = now_s
            heappush(events, (now_s + one.tokens, 0, one.number, one))
        if (wake_s := batcher.wake_s()) is not None:
            heappush(events, (max(wake_s, now_s), 2, 0, None))
    return started


def _jobs(*asked: tuple[float, int, bool]) -> list[Job]:
    """Of arrivals, lengths and whether they are interactive."""
    return [Job(n, at_s, 0, tokens, mine) for n, (at_s, tokens, mine) in enumerate(asked)]


USER, WORK = True, False


@each(
    "batcher, asked, starts",
    [
        (lambda: Batcher(1), [(0, 10, USER)] * 3, [0, 10, 20]),
        # A place that becomes free is taken at once.
        (lambda: Batcher(2), [(0, 3, USER), (0, 10, USER), (0, 10, USER)], [0, 0, 3]),
        (lambda: Batcher(None), [(0, 10, USER)] * 300, [0] * 300),
        # A static batch waits until it is complete.
        (lambda: Batches(2, None, None), [(0, 10, USER), (5, 10, USER), (7, 10, USER)], [5, 5]),
        # The next one starts when the longest of the last one has ended.
        (
            lambda: Batches(2, None, None),
            [(0, 3, USER), (0, 40, USER), (0, 10, USER), (0, 10, USER)],
            [0, 0, 40, 40],
        ),
        # A dynamic batch starts when its oldest has waited long enough, also beside one that runs.
        (lambda: Batches(4, 3.0, 1000), [(0, 10, USER), (2, 10, USER)], [3, 3]),
        (lambda: Batches(4, 3.0, 1000), [(0, 20, USER), (5, 10, USER)], [3, 23]),
        (lambda: parse("dynamic:2/50/1000")[0].make(None), [(1, 10, USER)], [1.05]),
        # It ends where the next request would have too many tokens; one with too many runs alone.
        (lambda: Batches(8, 30.0, 10), [(0, 6, USER), (0, 4, USER), (0, 1, USER)], [0, 0, 30]),
        (lambda: Batches(8, 30.0, 10), [(0, 50, USER), (0, 1, USER)], [0, 50]),
        # While both kinds wait, one gets 70 % of a hybrid's slots; who waits alone gets all.
        (lambda: Hybrid(4), [*[(0, 9, WORK)] * 7, (1, 9, USER)], [*[0] * 4, *[9] * 3, 9]),
        (lambda: Hybrid(4), [*[(0, 9, WORK)] * 8, (1, 9, USER)], [*[0] * 4, *[9] * 3, 18, 9]),
        (lambda: Hybrid(4), [(0, 9, USER)] * 5, [0, 0, 0, 0, 9]),
        # A split leaves neither kind the slots of the other; a batch is closed, a window is not.
        (
            lambda: Split(2, Batches(2, 0.5, None)),
            [(0, tokens, mine) for mine in (WORK, USER) for tokens in (5, 15, 25)],
            [0, 0, 15, 0, 0, 5],
        ),
    ],
)
def test_requests_start_when_the_batcher_says(
    batcher: Callable[[], Batcher], asked: list[tuple[int, int, bool]], starts: list[float]
) -> None:
    assert _play(batcher(), _jobs(*asked)) == pytest.approx(dict(enumerate(starts)))


def test_a_backlog_doubles_a_tuned_window_at_each_look_and_a_low_load_halves_it() -> None:
    batcher = Tuned()
    jobs = _jobs(*[(0, 10, USER)] * 64)
    for job in jobs:
        batcher.add(job)

    def looks(first: int, last: int) -> list[int | None]:
        """Its slots after each of these looks."""
        return [
            (batcher.next(look * LOOK_EVERY_S), batcher.slots)[1] for look in range(first, last)
        ]

    assert looks(0, 1) == [16]
    assert batcher.next(LOOK_EVERY_S / 2) == [], "between two looks it stays"
    assert looks(1, 4) == [32, 64, LARGEST]
    for job in jobs[:44]:
        batcher.ended(job)
    assert looks(4, 8) == [32, 32, 32, 32], "20 jobs are 63 % of 32"
    for job in jobs[44:]:
        batcher.ended(job)
    assert looks(8, 18)[-1] == SMALLEST


MAKERS = {
    one.name: one
    for one in parse(f"{DEFAULT},split:3/4/50/8192")
    if one.kind != "static"  # its last batch never becomes complete
}


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30), st.booleans()), max_size=60))
def test_every_request_starts_once_and_within_the_slots(
    name: str, asked: list[tuple[float, int, bool]]
) -> None:
    batcher, jobs = MAKERS[name].make(None), _jobs(*sorted(asked))
    started = _play(batcher, jobs)
    assert set(started) == {job.number for job in jobs}
    assert batcher.waiting == 0
    most = LARGEST if isinstance(batcher, Tuned) else batcher.slots or math.inf
    for now_s in set(started.values()):
        ends = [started[job.number] + job.tokens for job in jobs if started[job.number] <= now_s]
        assert sum(end_s > now_s for end_s in ends) <= most


def test_every_form_of_the_help_is_understood_and_nothing_else() -> None:
    kinds = ["serial", "static", "dynamic", "async", "continuous", "tuned", "hybrid", "split"]
    assert [one.kind for one in parse(f"{DEFAULT},split:16/32/50/8192")] == kinds
    (one,) = parse("static:8")
    assert (one.make(3).slots, one.make(None).slots) == (3, 8), "no larger than the users are many"
    wrong = "static static:0 dynamic:4 async:4/5 serial:1 split:4 magic async:-1".split()
    for text in [*wrong, ""]:
        with pytest.raises(ValueError, match=r"is no batcher: serial, static:N"):
            parse(text)


def test_lengths_are_mixed_equal_for_equal_seeds_and_seventy_percent_are_interactive() -> None:
    demands = list(islice(mix("a", 64), 5000))
    assert demands == list(islice(mix("a", 64), 5000)) != list(islice(mix("b", 64), 5000))
    lengths = [demand.output_tokens for demand in demands]
    assert (min(lengths), max(lengths)) == (4, 64)
    assert 0.45 < sum(length < 16 for length in lengths) / 5000 < 0.55
    assert 0.68 < sum(demand.interactive for demand in demands) / 5000 < 0.72


def test_occupancy_is_a_mean_over_time() -> None:
    running = Occupancy(10.0)
    running.note(11.0, 4)
    running.note(13.0, 1)
    assert running.mean(14.0) == pytest.approx((0 * 1 + 4 * 2 + 1 * 1) / 4)


_FIXED = ("async:8", "async:16", "async:32", "async:64")
_SPLIT, *_PARTS = "split:16/32/50/8192", "dynamic:32/50/8192", "async:16"


def _virtual(
    batchers: Sequence[str], *, engine: str = "tiny-cpu", seed: int = 1, **load: float
) -> dict[str, Row]:
    asked = Load(**load, window_s=10.0, grace_s=10.0, seed=str(seed))  # type: ignore[arg-type]
    measure = virtually(load_engine(engine), 32, 64)
    return {one.name: measure(one, asked, 1) for one in parse(",".join(batchers))}


def _speeds(rows: dict[str, Row]) -> dict[str, float]:
    return {name: row.tokens_per_s for name, row in rows.items()}


@pytest.mark.parametrize("seed", [1, 2, 3])
class TestVirtually:
    @pytest.mark.parametrize("users", [8, 32, 128])
    def test_the_adaptive_window_is_as_good_as_the_best_fixed_one(
        self, users: int, seed: int
    ) -> None:
        speeds = _speeds(_virtual([*_FIXED, "tuned"], users=users, seed=seed))
        best = max(speeds[name] for name in _FIXED)
        assert 0.95 * best <= speeds["tuned"] < 1.02 * best

    @pytest.mark.parametrize("users", [32, 128])
    def test_continuous_batching_beats_one_at_a_time_and_static_batches(
        self, users: int, seed: int
    ) -> None:
        speeds = _speeds(_virtual(["serial", "static:4", "continuous"], users=users, seed=seed))
        assert speeds["continuous"] >= 7 * speeds["serial"]
        assert speeds["continuous"] >= 1.5 * speeds["static:4"]

    def test_hybrid_gains_nothing_over_as_many_slots_without_classes(self, seed: int) -> None:
        speeds = _speeds(_virtual(["async:48", "hybrid:48"], rate_per_s=500.0, seed=seed))
        assert speeds["hybrid:48"] == pytest.approx(speeds["async:48"], rel=0.02)

    def test_slots_of_their_own_gain_what_they_add_to_what_is_in_flight(self, seed: int) -> None:
        """The articles' hybrid: 1.6 times its better part, and less than the same slots shared."""
        names = [_SPLIT, *_PARTS, "async:48"]
        rows = _virtual(names, rate_per_s=1500.0, engine="estimate-h100-llama-8b", seed=seed)
        speeds = _speeds(rows)
        better = max(speeds[name] for name in _PARTS)
        assert 1.5 * better < speeds[_SPLIT] < 1.8 * better
        assert speeds[_SPLIT] < 0.75 * speeds["async:48"]
        in_flight = sum(rows[name].in_flight for name in _PARTS)
        assert rows[_SPLIT].in_flight == pytest.approx(in_flight, rel=0.05)


def test_a_request_that_meets_an_idle_engine_takes_the_time_of_its_steps() -> None:
    (found,) = _virtual(["continuous"], rate_per_s=0.5).values()
    timing = load_engine("tiny-cpu").timing
    first_ms = timing.request_ms + timing.step_ms + 32 * timing.prefill_token_us / 1e3
    assert first_ms < found.end_to_end.p50_ms < first_ms + 64 * (timing.step_ms + 1)


def test_the_command_prints_what_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--virtual", "--batching", "async:8,hybrid:8", "--load-percent", "500"]
    assert main([*words, "--duration-s", "2", "--rounds", "2", "--concurrency", "4,16"]) == 0
    said = capsys.readouterr().out
    assert "| 500 % | hybrid:8 | async:8 | tokens/s | 1.0" in said
    assert "nan" not in said
    assert not math.isnan(float(said.split("100 %: ")[1].split()[0]))
    assert main(["--virtual", "no-such", "--batching"]) == 2
    assert "no engine no-such" in capsys.readouterr().err


async def _measure(batcher: str, engine: Engine, window_s: float = 0.3, **load: float) -> Row:
    (specification,) = parse(batcher)
    asked = Load(**load, window_s=window_s, grace_s=window_s, seed="s", label="load")  # type: ignore[arg-type]
    with serving(engine) as server:
        made = specification.make(asked.users or None)
        ran = await Run(made, HttpEndpoint(maker(server.url)), asked, mix("s", 16, 5)).measure()
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
        found = await _measure(batcher, engine, users=6)
        assert engine.most_running == most
        assert found.errors == 0, found.error_kinds
        assert 0.3 * most < found.in_flight <= most

    async def test_what_was_kept_waiting_is_unfinished_and_counts_with_its_wait(self) -> None:
        found = await _measure("serial", Engine(10.0), users=20)
        assert found.unfinished == found.requests == 20
        assert found.end_to_end.p50_ms >= 300, "less than the window for which they waited"
        assert "≥" in line(COLUMNS, found)

    async def test_what_does_not_end_in_time_is_broken_off_at_the_server_too(self) -> None:
        engine = Engine(1000.0)
        found = await _measure("continuous", engine, window_s=0.1, users=3)
        assert (found.requests, found.unfinished, found.errors) == (3, 3, 0)
        assert found.tokens_per_s == 0
        await eventually(lambda: engine.running == 0)

    async def test_arrivals_do_not_wait_for_answers(self) -> None:
        engine = Engine(0.05)
        # Long beside the seconds for which a machine stands still: nothing arrives afterwards.
        found = await _measure("continuous", engine, window_s=5.0, rate_per_s=40.0)
        assert engine.most_running > 10
        assert found.requests > 10


class _Broken(Endpoint):
    """Never answers, or fails."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    async def answer(self, job: Job, exchange: Exchange) -> None:
        if self._error is not None:
            raise self._error
        await asyncio.Event().wait()


async def test_a_failure_to_send_ends_the_run() -> None:
    run = Run(Batcher(1), _Broken(ValueError("broken")), Load(users=2, window_s=60.0), alike(1))
    with pytest.raises(ExceptionGroup) as failed:
        await asyncio.wait_for(run.measure(), 60)
    assert str(failed.value.exceptions[0]) == "broken"


async def test_a_run_that_ends_tells_what_was_not_sent_from_what_was_broken_off() -> None:
    load = Load(users=2, window_s=0.01, grace_s=0.01)
    ran = await asyncio.wait_for(Run(Batcher(1), _Broken(None), load, alike(1)).measure(), 60)
    assert [one.exchange is not None for one in ran.served] == [True, False]
    assert not any(one.ended.is_set() for one in ran.served)


def test_ratios_are_taken_round_by_round_against_the_best_of_each_kind() -> None:
    names = ["serial", "static:4", "async:8", "async:16", "continuous", "tuned", "hybrid:64"]
    speeds = dict(zip(names, [10.0, 40.0, 50.0, 60.0, 80.0, 57.0, 90.0], strict=True))
    speeds |= {_SPLIT: 120.0}
    rows = [
        row(name, round=number, tokens_per_s=speed * number)
        for name, speed in speeds.items()
        for number in (1, 2, 3)
    ]
    found = {(one.ours, one.theirs): one.spread for one in ratios(rows)}
    assert found["continuous", "serial"].median == 8.0
    assert found["tuned", "async:16"].median == 0.95
    assert found["hybrid:64", "async:16"].low == 1.5
    assert found[_SPLIT, "async:16"].median == 2.0, "a split is compared with its better part"
    assert ("tuned", "async:8") not in found
    said = ratios_table(ratios(rows))
    assert "| 8 | continuous | serial | tokens/s | 8.00 (8.00–8.00) |" in said
    assert "| 8 | continuous | 0.0 | 160 (80–240) | 1 | 2 |" in summary(COLUMNS, rows)
