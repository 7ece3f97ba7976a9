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


@each(
    "batcher, jobs, starts",
    [
        (lambda: Batcher(1), [(0, 10), (0, 10), (0, 10)], [0, 10, 20]),
        # A place that becomes free is taken at once.
        (lambda: Batcher(2), [(0, 3), (0, 10), (0, 10)], [0, 0, 3]),
        (lambda: Batcher(None), [(0, 10)] * 300, [0] * 300),
        # A static batch waits until it is complete.
        (lambda: Batches(2, None, None), [(0, 10), (5, 10), (7, 10)], [5, 5]),
        # The next one starts when the longest of the last one has ended.
        (lambda: Batches(2, None, None), [(0, 3), (0, 40), (0, 10), (0, 10)], [0, 0, 40, 40]),
        # A dynamic batch starts when its oldest has waited long enough, also beside one that runs.
        (lambda: Batches(4, 3.0, 1000), [(0, 10), (2, 10)], [3, 3]),
        (lambda: Batches(4, 3.0, 1000), [(0, 20), (5, 10)], [3, 23]),
        # It ends where the next request would have too many tokens; one with too many runs alone.
        (lambda: Batches(8, 30.0, 10), [(0, 6), (0, 4), (0, 1)], [0, 0, 30]),
        (lambda: Batches(8, 30.0, 10), [(0, 50), (0, 1)], [0, 50]),
    ],
)
def test_requests_start_when_the_batcher_says(
    batcher: Callable[[], Batcher], jobs: list[tuple[int, int]], starts: list[int]
) -> None:
    arriving = [_job(n, at_s, tokens=tokens) for n, (at_s, tokens) in enumerate(jobs)]
    assert _play(batcher(), arriving) == dict(enumerate(starts))


def _waiting(batcher: Batcher, count: int, interactive: Callable[[int], bool]) -> list[Job]:
    """Jobs that wait, and have just come."""
    jobs = [_job(number, interactive=interactive(number)) for number in range(count)]
    for job in jobs:
        batcher.add(job)
    return jobs


class TestTuned:
    @staticmethod
    def _looks(batcher: Tuned, first: int, last: int) -> list[int | None]:
        """Its slots after each of these looks."""
        seen = []
        for look in range(first, last):
            batcher.next(look * LOOK_EVERY_S)
            seen.append(batcher.slots)
        return seen

    def test_a_backlog_doubles_the_window_at_each_look_and_a_low_load_halves_it(self) -> None:
        batcher = Tuned()
        jobs = _waiting(batcher, 64, lambda _: True)
        assert self._looks(batcher, 0, 4) == [16, 32, 64, LARGEST]
        for job in jobs[:44]:
            batcher.ended(job)
        assert self._looks(batcher, 4, 8) == [32, 32, 32, 32], "20 jobs are 63 % of 32"
        for job in jobs[44:]:
            batcher.ended(job)
        assert self._looks(batcher, 8, 18)[-1] == SMALLEST

    def test_between_two_looks_the_window_stays(self) -> None:
        batcher = Tuned()
        _waiting(batcher, 200, lambda _: True)
        assert len(batcher.next(0.0)) == 16
        assert batcher.next(LOOK_EVERY_S / 2) == []
        assert self._looks(batcher, 1, 6)[-1] == LARGEST == 64, "no larger, whatever waits"

    @each("users", [8, 12, 24, 32, 64])
    def test_a_steady_demand_finds_a_window_that_holds_it(self, users: int) -> None:
        batcher = Tuned()
        _waiting(batcher, users, lambda _: True)
        self._looks(batcher, 0, 10)
        assert batcher.waiting == 0


class TestHybrid:
    def test_interactive_requests_get_seventy_percent_of_the_slots_while_both_wait(self) -> None:
        batcher = Hybrid(10)
        _waiting(batcher, 100, lambda number: number % 2 == 0)
        started = batcher.next(0.0)
        assert (len(started), sum(job.interactive for job in started)) == (10, 7)

    @each("interactive", [True, False])
    def test_whoever_waits_alone_gets_every_slot(self, interactive: bool) -> None:
        batcher = Hybrid(10)
        _waiting(batcher, 100, lambda _: interactive)
        assert len(batcher.next(0.0)) == 10

    def test_an_interactive_request_passes_a_batch_backlog(self) -> None:
        jobs = [_job(n, interactive=False) for n in range(20)] + [_job(99, 1.0)]
        started = _play(Hybrid(4), jobs)
        assert started[99] == 10, "the first slot that becomes free"


class TestSplit:
    def test_neither_kind_uses_the_slots_of_the_other(self) -> None:
        split = Split(3, Batches(4, 0.0, None))
        _waiting(split, 20, lambda _: False)
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
