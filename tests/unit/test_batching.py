"""`scripts/bench --batching`: what each batcher starts and when."""

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.benchmark.__main__ import main
from scripts.benchmark.batchers import (
    DEFAULT,
    LARGEST,
    Batcher,
    Batches,
    Hybrid,
    Job,
    Split,
    Tuned,
    parse,
)
from tests.tables import each

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


def test_the_command_prints_what_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--virtual", "--batching", "async:8,hybrid:8", "--load-percent", "500"]
    assert main([*words, "--duration-s", "2", "--rounds", "2", "--concurrency", "4,16"]) == 0
    said = capsys.readouterr().out
    assert "| 500 % | hybrid:8 | async:8 | tokens/s | 1.0" in said
    assert "nan" not in said
    assert not math.isnan(float(said.split("100 %: ")[1].split()[0]))
    assert main(["--virtual", "no-such", "--batching"]) == 2
    assert "no engine no-such" in capsys.readouterr().err
