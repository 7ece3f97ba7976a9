"""The batchers of `scripts/bench --batching`, in virtual time: what each starts, and when."""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    mix,
    parse,
)
from scripts.benchmark.run import Occupancy
from tests.tables import each

pytestmark = pytest.mark.nightly  # a tool


def _job(number: int, arrived_s: float = 0.0, *, tokens: int = 10, interactive: bool = True) -> Job:
    return Job(number, arrived_s, 0, tokens, interactive)


def _play(batcher: Batcher, jobs: Sequence[Job], until_s: float = 1e9) -> dict[int, float]:
    """When each job started; one token takes a second, whatever else runs."""
    events: list[tuple[float, int, int, Job | None]] = []
    for order, arriving in enumerate(jobs):
        heappush(events, (arriving.arrived_s, 1, order, arriving))
    started: dict[int, float] = {}
    while events and events[0][0] <= until_s:
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


class TestWindow:
    def test_serial_runs_one_at_a_time_in_the_order_of_arrival(self) -> None:
        assert _play(Batcher(1), [_job(n) for n in range(3)]) == {0: 0, 1: 10, 2: 20}

    def test_a_place_that_becomes_free_is_taken_at_once(self) -> None:
        jobs = [_job(0, tokens=3), _job(1, tokens=10), _job(2)]
        assert _play(Batcher(2), jobs) == {0: 0, 1: 0, 2: 3}

    def test_continuous_keeps_nothing_waiting(self) -> None:
        assert set(_play(Batcher(None), [_job(n) for n in range(300)]).values()) == {0}


class TestBatches:
    def test_a_static_batch_waits_until_it_is_complete(self) -> None:
        jobs = [_job(0, 0), _job(1, 5), _job(2, 7)]
        assert _play(Batches(2, None, None), jobs) == {0: 5, 1: 5}

    def test_the_next_batch_starts_when_the_longest_of_the_last_one_has_ended(self) -> None:
        jobs = [_job(0, tokens=3), _job(1, tokens=40), _job(2), _job(3)]
        assert _play(Batches(2, None, None), jobs) == {0: 0, 1: 0, 2: 40, 3: 40}

    def test_a_dynamic_batch_starts_when_its_oldest_has_waited_long_enough(self) -> None:
        jobs = [_job(0, 0), _job(1, 2)]
        assert _play(Batches(4, 3.0, 1000), jobs) == {0: 3, 1: 3}

    def test_the_wait_goes_on_while_a_batch_runs(self) -> None:
        jobs = [_job(0, 0, tokens=20), _job(1, 5)]
        assert _play(Batches(4, 3.0, 1000), jobs) == {0: 3, 1: 23}

    def test_a_batch_ends_where_the_next_request_would_have_too_many_tokens(self) -> None:
        jobs = [_job(0, tokens=6), _job(1, tokens=4), _job(2, tokens=1)]
        assert _play(Batches(8, 30.0, 10), jobs) == {0: 0, 1: 0, 2: 30}

    def test_a_request_with_too_many_tokens_for_any_batch_runs_alone(self) -> None:
        jobs = [_job(0, tokens=50), _job(1, tokens=1)]
        assert _play(Batches(8, 30.0, 10), jobs) == {0: 0, 1: 50}


class TestTuned:
    def test_a_backlog_doubles_the_window_at_each_look_up_to_the_largest(self) -> None:
        batcher = Tuned()
        for number in range(200):
            batcher.add(_job(number))
        seen = []
        for look in range(6):
            batcher.next(look * LOOK_EVERY_S)
            seen.append(batcher.slots)
        assert seen == [16, 32, 64, 64, 64, 64]

    def test_between_two_looks_the_window_stays(self) -> None:
        batcher = Tuned()
        for number in range(200):
            batcher.add(_job(number))
        assert len(batcher.next(0.0)) == 16
        assert batcher.next(LOOK_EVERY_S / 2) == []

    def test_it_halves_below_half_of_the_load_and_keeps_what_runs(self) -> None:
        batcher = Tuned()
        jobs = [_job(number) for number in range(64)]
        for job in jobs:
            batcher.add(job)
        for look in range(4):
            batcher.next(look * LOOK_EVERY_S)
        assert batcher.slots == LARGEST
        for job in jobs[:44]:
            batcher.ended(job)
        seen = []
        for look in range(4, 8):
            batcher.next(look * LOOK_EVERY_S)
            seen.append(batcher.slots)
        assert seen == [32, 32, 32, 32], "20 jobs are 63 % of 32"

    def test_it_never_falls_below_the_smallest(self) -> None:
        batcher = Tuned()
        for look in range(10):
            batcher.next(look * LOOK_EVERY_S)
        assert batcher.slots == SMALLEST

    @pytest.mark.parametrize("users", [8, 12, 24, 32, 64])
    def test_a_steady_demand_finds_a_window_that_holds_it(self, users: int) -> None:
        batcher = Tuned()
        for number in range(users):
            batcher.add(_job(number))
        for look in range(10):
            batcher.next(look * LOOK_EVERY_S)
        assert batcher.waiting == 0


class TestHybrid:
    def test_interactive_requests_get_seventy_percent_of_the_slots_while_both_wait(self) -> None:
        batcher = Hybrid(10)
        for number in range(100):
            batcher.add(_job(number, interactive=number % 2 == 0))
        started = batcher.next(0.0)
        assert sum(job.interactive for job in started) == 7
        assert len(started) == 10

    @pytest.mark.parametrize("interactive", [True, False])
    def test_whoever_waits_alone_gets_every_slot(self, interactive: bool) -> None:
        batcher = Hybrid(10)
        for number in range(100):
            batcher.add(_job(number, interactive=interactive))
        assert len(batcher.next(0.0)) == 10

    def test_an_interactive_request_passes_a_batch_backlog(self) -> None:
        jobs = [_job(n, interactive=False) for n in range(20)] + [_job(99, 1.0)]
        started = _play(Hybrid(4), jobs)
        assert started[99] == 10, "the first slot that becomes free"


class TestSplit:
    def test_neither_kind_uses_the_slots_of_the_other(self) -> None:
        split = Split(3, Batches(4, 0.0, None))
        for number in range(20):
            split.add(_job(number, interactive=False))
        assert [job.number for job in split.next(0.0)] == [0, 1, 2, 3]
        split.add(_job(20))
        assert [job.number for job in split.next(0.0)] == [20]
        assert (split.waiting, split.slots) == (16, 7)

    def test_a_batch_is_closed_and_a_window_is_not(self) -> None:
        jobs = [_job(n, tokens=5 + 10 * n, interactive=False) for n in range(3)]
        jobs += [_job(10 + n, tokens=5 + 10 * n) for n in range(3)]
        started = _play(Split(2, Batches(2, 0.5, None)), jobs)
        assert started == {0: 0, 1: 0, 2: 15, 10: 0, 11: 0, 12: 5}


MAKERS: list[tuple[str, Callable[[], Batcher]]] = [
    (one.name, lambda one=one: one.make(None))  # type: ignore[misc]
    for one in parse(f"{DEFAULT},split:3/4/50/8192")
    if one.kind != "static"
]


@pytest.mark.parametrize(("name", "make"), MAKERS, ids=[name for name, _ in MAKERS])
@settings(max_examples=30, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30), st.booleans()), max_size=60)
)
def test_every_request_starts_once_and_within_the_slots(
    name: str, make: Callable[[], Batcher], arrivals: list[tuple[int, int, bool]]
) -> None:
    jobs = [_job(n, at, tokens=t, interactive=i) for n, (at, t, i) in enumerate(sorted(arrivals))]
    batcher = make()
    started = _play(batcher, jobs)
    assert set(started) == {job.number for job in jobs}
    assert batcher.waiting == 0
    if (slots := batcher.slots) is not None:
        most = LARGEST if isinstance(batcher, Tuned) else slots
        for now_s in set(started.values()):
            running = [
                job
                for job in jobs
                if started[job.number] <= now_s < started[job.number] + job.tokens
            ]
            assert len(running) <= most


class TestSpecifications:
    def test_every_form_of_the_help_is_understood(self) -> None:
        assert [one.kind for one in parse(f"{DEFAULT},split:16/32/50/8192")] == [
            *("serial", "static", "dynamic", "async", "continuous", "tuned", "hybrid", "split")
        ]

    def test_a_dynamic_batch_has_size_wait_and_tokens(self) -> None:
        (one,) = parse("dynamic:2/50/1000")
        batcher = one.make(None)
        batcher.add(_job(0, 1.0))
        assert batcher.next(1.0) == []
        assert batcher.wake_s() == pytest.approx(1.05)

    def test_a_static_batch_is_no_larger_than_the_number_of_users(self) -> None:
        (one,) = parse("static:8")
        assert one.make(3).slots == 3
        assert one.make(None).slots == 8

    @each(
        "text",
        [
            "static",
            "static:0",
            "dynamic:4",
            "async:4/5",
            "serial:1",
            "split:4",
            "magic",
            "async:-1",
            "",
        ],
    )
    def test_what_is_no_batcher_is_refused_with_the_forms(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"is no batcher: serial, static:N"):
            parse(text)


class TestMix:
    def test_equal_seeds_ask_for_the_same(self) -> None:
        assert list(islice(mix("a", 64), 50)) == list(islice(mix("a", 64), 50))
        assert list(islice(mix("a", 64), 50)) != list(islice(mix("b", 64), 50))

    def test_lengths_are_mixed_and_seventy_percent_are_interactive(self) -> None:
        demands = list(islice(mix("a", 64), 5000))
        lengths = [demand.output_tokens for demand in demands]
        assert (min(lengths), max(lengths)) == (4, 64)
        assert 0.45 < sum(length < 16 for length in lengths) / 5000 < 0.55
        assert 0.68 < sum(demand.interactive for demand in demands) / 5000 < 0.72


def test_occupancy_is_a_mean_over_time() -> None:
    running = Occupancy(10.0)
    running.note(11.0, 4)
    running.note(13.0, 1)
    assert running.mean(14.0) == pytest.approx((0 * 1 + 4 * 2 + 1 * 1) / 4)
