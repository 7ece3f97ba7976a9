"""The room in the engines' memory: what is reserved, who fits, and who may pass whom."""

from __future__ import annotations

import math
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.contract import EngineReport, Written
from serve_app.policy.classes import CLASSES
from serve_app.policy.order import Scheduler
from serve_app.policy.overtaking import Patience
from serve_app.policy.prompts import Prompts
from serve_app.policy.room import Room
from serve_app.policy.running import Running
from tests.unit.virtual_order import Entry

LONGEST = 4096


def engine(kv_tokens: int, used: int = 0, preemptions: int = 0, name: str = "e") -> EngineReport:
    return EngineReport(name, kv_tokens, LONGEST, used, preemptions=preemptions)


def scheduler(kv_tokens: int, share: int | None = None, others: int = 0) -> Scheduler[Entry]:
    its = Scheduler[Entry]()
    its.capacity = 1_000
    its.room_changed([engine(kv_tokens)], kv_tokens if share is None else share, others)
    return its


def entry(prompt: int, request_class: str = "standard", tenant: str = "t") -> Entry:
    """A request that writes one token."""
    return Entry(request_class, 0, tenant, prompt, 1, max_output_tokens=1)


def started(its: Scheduler[Entry], now_ms: int = 0) -> list[Running[Entry]]:
    found: list[Running[Entry]] = []
    while (running := its.next(now_ms)) is not None:
        found.append(running)
    return found


def prompts(running: list[Running[Entry]]) -> list[int]:
    return [one.entry.prompt_tokens for one in running]


def test_a_request_starts_when_there_is_room_for_it() -> None:
    its = scheduler(1_000)
    for _ in range(5):
        its.add(entry(400))
    first = started(its)
    assert len(first) == 2
    its.ended(first[0], Written(1))
    assert len(started(its)) == 1
    its.room_changed((), 0, 0)
    assert len(started(its)) == 2, "without reports there is no bound"


def test_what_is_longer_than_the_share_starts_alone_and_what_others_leave_is_enough() -> None:
    its = scheduler(4_000, share=1_000)
    its.add(entry(2_000))
    assert prompts(started(its)) == [2_000]
    late_ms = int(1000 * Patience().overdue_s)
    for request_class in CLASSES:
        crowded = scheduler(4_000, share=1_000, others=3_000)
        crowded.add(entry(2_000, request_class))
        assert not started(crowded)
        found = prompts(started(crowded, late_ms))
        assert found == [2_000], "it does not wait for others for ever"


def test_smaller_ones_pass_the_head_until_they_have_reserved_what_it_needs() -> None:
    its = scheduler(1_000)
    its.add(entry(700, tenant="first"))
    (running,) = started(its)
    its.add(entry(900, tenant="head"))
    for _ in range(20):
        its.add(entry(100, tenant="small"))
    passed: list[Running[Entry]] = []
    for turn in range(30):
        new = started(its, turn)
        passed += new
        if not new:
            break
        for one in new:
            its.ended(one, Written(1))
    assert 0 < sum(one.reserved_tokens for one in passed) <= 917
    assert 900 not in prompts(passed)
    its.ended(running, Written(1))
    assert prompts(started(its, 100))[0] == 900, "the room was kept for it"
    assert its.overtaking.passes == len(passed)


@pytest.mark.parametrize("urgent", ["critical", "realtime"])
def test_urgent_requests_are_not_held_up_by_a_batch_request_that_waits_for_room(
    urgent: str,
) -> None:
    its = scheduler(1_000)
    its.add(entry(700, "batch"))
    (running,) = started(its)
    its.add(entry(900, "batch"))
    assert not started(its)
    for turn in range(100):
        its.add(entry(200, urgent))
        (one,) = started(its, turn)
        assert one.entry.request_class == urgent
        its.ended(one, Written(1))
    late_ms = int(1000 * Patience().held_up_s) + 100
    its.add(entry(200, urgent))
    last = started(its, late_ms)
    assert len(last) == (urgent == "critical"), "the batch request must start some time, too"
    for one in [running, *last]:
        its.ended(one, Written(1))
    assert prompts(started(its, late_ms))[0] == 900


def test_urgent_requests_use_what_other_ingresses_leave_free_and_a_little_more() -> None:
    its = scheduler(16_000, share=4_000, others=9_000)
    its.add(entry(3_900, "batch"))
    assert started(its)
    its.add(entry(3_000, "batch"))
    assert not started(its)
    its.add(entry(3_000, "realtime"))
    assert prompts(started(its)) == [3_000]
    its.add(entry(3_000, "realtime"))
    assert not started(its)


def test_one_more_than_fits_is_given_out_until_an_engine_preempts() -> None:
    room = Room()
    calm = [engine(1_000, used=500)]
    room.reported(calm, 1_000, 0, short=False)
    assert room.factor == 1
    for _ in range(200):
        room.reported(calm, 1_000, 0, short=True)
    more = room.factor
    assert more > 2
    assert room.need(100, 400) < 100 + 400 / 2 + 20, "what is counted less is the output"
    room.reported([engine(1_000, used=500, preemptions=3)], 1_000, 0, short=True)
    assert room.factor == pytest.approx(0.85 * more)
    less = room.factor
    room.reported([engine(1_000, used=500, preemptions=4)], 1_000, 0, short=True)
    assert room.factor == less, "what was started before still runs"
    room.reported([engine(1_000, used=990)], 1_000, 0, short=True)
    assert room.factor < less, "an engine that was started again counts from 0"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "next", "end", "report"]),
            st.integers(0, 3),
            st.integers(1, 3_000),
        ),
        max_size=120,
    )
)
@settings(max_examples=150, deadline=None)
def test_what_is_reserved_is_what_runs_and_never_negative(
    steps: list[tuple[str, int, int]],
) -> None:
    its, now_ms = scheduler(4_000, share=2_000), count()
    running: list[Running[Entry]] = []
    for step, number, size in steps:
        if step == "add":
            its.add(entry(size, CLASSES[number], f"t{number}"))
        elif step == "next":
            running += started(its, next(now_ms))
        elif step == "end" and running:
            its.ended(running.pop(size % len(running)), Written(1))
        else:
            its.room_changed([engine(4_000, size, number)], 2_000, size // 2)
        assert its.room.reserved_tokens == sum(one.reserved_tokens for one in its.running) >= 0
        assert {id(one) for one in its.running} == {id(one) for one in running}
    while running or len(its):
        running += started(its, 20_000 * next(now_ms))
        running += started(its, 20_000 * next(now_ms))
        assert running, "somebody waits, and nothing runs"
        its.ended(running.pop(0), Written(1))
    assert not its.room.reserved_tokens


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 1_500)), min_size=1, max_size=60),
)
@settings(max_examples=150, deadline=None)
def test_no_room_is_free_while_work_that_fits_waits_unless_it_is_kept(
    work: list[tuple[int, int]],
) -> None:
    its = scheduler(2_000)
    running: list[Running[Entry]] = []
    for turn, (number, size) in enumerate(work):
        its.add(entry(size, CLASSES[number], f"t{number}"))
        running += started(its, turn)
        for one in its:
            tokens = its.room.need(one.prompt_tokens, 1)
            kept = any(held.left_tokens < tokens for held in its.overtaking._held.values())
            assert kept or not its.room.fits(tokens)
        if running and turn % 3 == 0:
            its.ended(running.pop(0), Written(1))


@given(st.lists(st.integers(100, 1_900), min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_nobody_starves_however_many_small_ones_come(sizes: list[int]) -> None:
    """After the head has been passed by as much as it needs, it starts with the next ends."""
    its = scheduler(2_000)
    for number, size in enumerate(sizes):
        its.add(entry(size, tenant=f"large-{number}"))
    large, running = len(sizes), list[Running[Entry]]()
    for turn in range(3_000):
        its.add(entry(20, tenant="small"))
        new = started(its, turn)
        large -= sum(one.entry.tenant != "small" for one in new)
        running += new
        if not large:
            return
        if len(running) > 5 or not new:
            its.ended(running.pop(0), Written(1))
    raise AssertionError(f"{large} of {len(sizes)} never started")


def test_prompts_count_as_engines_have_counted_those_before() -> None:
    its = Prompts()
    assert its.predict(entry(100), 100) == 100
    for _ in range(50):
        its.learn(entry(100), 100, 250)
    its.learn(entry(100), 100, 0)
    assert its.predict(entry(200), 200) == pytest.approx(500)
    assert its.predict(entry(200, tenant="another"), 200) == 200


def test_no_request_reserves_more_than_the_context_of_the_model() -> None:
    room = Room()
    assert room.need(10, 1e9) > LONGEST
    room.reported([engine(10**6)], 10**6, 0, short=False)
    assert room.need(10, 1e9) == LONGEST
    assert math.isinf(Room().capacity_tokens)
