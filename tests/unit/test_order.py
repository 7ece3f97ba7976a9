"""The order of work: which claimed request starts, and what is claimed next."""

from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.contract import CompletionStats
from serve_app.policy.classes import CLASSES, VirtualCounters
from serve_app.policy.order import DEFAULT_RULES, Claim, Completion, Scheduler
from tests.tables import each
from tests.unit.virtual_order import NEVER_MS, Entry, VirtualService

AHEAD = int(DEFAULT_RULES.claim_ahead)


def scheduler(capacity: int, *entries: Entry) -> Scheduler[Entry]:
    made = Scheduler[Entry]()
    made.capacity = capacity
    for entry in entries:
        made.add(entry)
    return made


def started(its: Scheduler[Entry], now_ms: int = 0) -> list[Entry]:
    """All requests that start now."""
    entries = []
    while (running := its.next(now_ms)) is not None:
        entries.append(running.entry)
    return entries


def end(
    its: Scheduler[Entry], entry: Entry, written: CompletionStats | None = None
) -> Completion | None:
    """A request that runs has ended."""
    return its.ended(next(one for one in its.running if one.entry is entry), written)


def test_what_waits_in_quarantine_gives_its_slots_back_and_takes_them_again() -> None:
    two, other = Entry("standard", 0, sequences=2), Entry("batch", 1)
    its = scheduler(2, two, other)
    assert started(its) == [two]
    for _ in range(2):  # twice says no more than once
        its.give_back(list(its.running))
    assert (its.sequences, its.general_sequences) == (0, 0)
    assert started(its) == [other]
    its.give_back([])
    assert its.sequences == 3
    assert its.full
    its.give_back(one for one in its.running if one.entry is two)
    end(its, two)
    end(its, other)
    assert (its.sequences, its.general_sequences) == (0, 0)


def test_what_is_dropped_leaves_the_order_as_if_it_had_never_come() -> None:
    unwanted, other = Entry("realtime", 0, sequences=2), Entry("standard", 1)
    its = scheduler(1, unwanted, other)
    assert its.waiting_sequences == 3
    assert its.drop(lambda entry: entry is unwanted)
    assert not its.drop(lambda entry: entry is unwanted)
    assert (its.waiting_sequences, its.waiting()) == (1, {"standard": (1, 1)})
    assert started(its) == [other]
    assert len(its) == 0


def test_urgent_classes_go_first_and_within_a_tenant_the_oldest() -> None:
    realtime, critical = Entry("realtime", 9), Entry("critical", 10)
    old, new = Entry("standard", 2), Entry("standard", 3)
    its = scheduler(4, new, realtime, old, critical)
    assert started(its) == [critical, realtime, old, new]
    batch = Entry("batch", 1)
    assert [one.entry for one in scheduler(0).adopt([new, batch, realtime, old])] == [
        realtime,
        old,
        new,
        batch,
    ]


def test_requests_taken_over_while_they_run_count() -> None:
    waits = Entry("standard", 9)
    its = scheduler(2, waits)
    first, second, _ = its.adopt([Entry("batch", 1), Entry("batch", 2), Entry("batch", 3)])
    assert started(its) == []
    its.ended(first)
    assert started(its) == []
    its.ended(second)
    assert started(its) == [waits]


@pytest.mark.parametrize(("capacity", "claiming"), [(0, True), (1, False)])
def test_without_an_engine_or_under_a_newer_ray_cluster_nothing_more_is_claimed(
    capacity: int, claiming: bool
) -> None:
    """What was claimed before waits for an engine; it starts when there is room again."""
    entries = [Entry("standard", 1), Entry("standard", 2)]
    its = scheduler(capacity, *entries)
    its.claiming = claiming
    assert its.wanted() is None
    assert started(its) == entries[:capacity]
    its.capacity = 2
    assert started(its) == entries[capacity:]
    assert its.wanted() is None or claiming


@each("capacity, of_each", [(1, 2), (2, 1), (4, 1), (5, 2), (64, 16)])
def test_an_idle_ingress_claims_a_little_more_than_may_start(capacity: int, of_each: int) -> None:
    assert scheduler(capacity).wanted() == Claim(CLASSES, of_each, wait=True)


def test_while_some_wait_every_class_is_filled_up_without_waiting_for_arrivals() -> None:
    its = scheduler(8, Entry("batch"))
    assert its.wanted() == Claim(CLASSES, 16, wait=False)
    for number in range(8 * AHEAD - 3):
        its.add(Entry("batch", number))
    assert its.wanted() == Claim(CLASSES, 2, wait=False)
    its.add(Entry("batch"))
    its.add(Entry("batch"))
    assert its.wanted() == Claim(CLASSES[:3], 16, wait=False)


def test_a_slot_that_is_spare_for_all_that_wait_is_kept_for_what_comes() -> None:
    """A batch and long answers leave it, and the next claim waits for an arrival."""
    its = scheduler(4, *(Entry("batch", n) for n in range(9)))
    its.general_capacity = 3
    assert [one.accepted_ms for one in started(its)] == [0, 1, 2]
    wanted = its.wanted()
    assert wanted is not None
    assert wanted.wait
    assert "realtime" in wanted.classes
    its.add(urgent := Entry("realtime", 10))
    assert started(its) == [urgent]
    assert its.wanted() is None, "all slots are taken"


def test_a_batch_leaves_the_spare_slots_free_beside_whatever_runs() -> None:
    its = scheduler(16, *(Entry("realtime", n) for n in range(2)))
    its.general_capacity = 14
    assert len(started(its)) == 2
    for number in range(20):
        its.add(Entry("batch", 10 + number))
    assert len(started(its)) == 12
    urgent = [Entry("realtime", 30 + number) for number in range(3)]
    for entry in urgent:
        its.add(entry)
    assert started(its) == urgent[:2]


def test_a_batch_gets_its_share_beside_interactive_work_that_never_waits() -> None:
    """Of 16 slots 14 are taken; what is free is less than the share of batches."""
    its = scheduler(16, *(Entry("realtime", n) for n in range(14)))
    its.general_capacity = 14
    assert len(started(its)) == 14
    for number in range(20):
        its.add(Entry("batch", 20 + number))
    assert [one.request_class for one in started(its)] == ["batch"] * 2


def test_the_share_of_a_batch_counts_cost_and_not_slots() -> None:
    """Two long lines beside twelve short requests are more than their share."""
    its = scheduler(16, *(Entry("realtime", n) for n in range(12)))
    its.general_capacity = 14
    assert len(started(its)) == 12
    for number in range(20):
        its.add(Entry("batch", 20 + number, prompt_tokens=10_000))
    assert [one.request_class for one in started(its)] == ["batch"] * 2


def test_short_answers_take_spare_slots_and_of_an_unknown_kind_one_tries() -> None:
    its = scheduler(8, *(Entry("standard", n, "long", kind="chat") for n in range(20)))
    its.general_capacity = 4
    assert [one.tenant for one in started(its)] == ["long"] * 5, "one of them tries"
    for number in range(6):
        its.add(Entry("standard", 30 + number, "short", kind="chat"))
    (first,) = started(its)
    assert first.tenant == "short"
    end(its, first, CompletionStats(20))
    assert [one.tenant for one in started(its)] == ["short"] * 3, "what is alike is short"
    assert its.full
    tries = next(one for one in its.running if one.probation)
    its.ended(tries, CompletionStats(5_000))
    (next_one,) = started(its)
    assert next_one.tenant == "short", "what is alike is long"


def test_requests_of_unknown_kinds_hold_half_of_the_spare_slots_at_most() -> None:
    its = scheduler(16, *(Entry("standard", n, f"t{n}", kind="chat") for n in range(40)))
    its.general_capacity = 8
    assert len(started(its)) == 8 + 4
    urgent = [Entry("realtime", 100 + number) for number in range(5)]
    for entry in urgent:
        its.add(entry)
    assert started(its) == urgent[:4]


def test_a_request_counts_as_many_slots_as_it_has_sequences() -> None:
    its: Scheduler[Entry] = Scheduler(DEFAULT_RULES._replace(engine_slots=8))
    its.capacity = 8
    for number, sequences in enumerate((3, 100, 1)):
        its.add(Entry("standard", number, sequences=sequences))
    assert its.waiting_sequences == 3 + 8 + 1
    first, second = started(its)
    assert (first.sequences, second.sequences) == (3, 100)
    assert its.sequences == 3 + 8, "it starts in what is free, and no engine runs more"
    assert its.waiting_sequences == 1
    end(its, second, CompletionStats(1))
    (third,) = started(its)
    assert its.sequences == 3 + third.sequences == 4
    assert its.waiting_sequences == 0


def test_many_answers_leave_the_spare_slots_to_others() -> None:
    """A request with 14 answers starts where 5 of 16 slots are taken. The engine is then full, and
    3 of them wait in it; and yet two short requests may start, which pass these there.
    """
    its = scheduler(16)
    its.general_capacity = 14
    its.adopt(Entry("batch") for _ in range(5))
    its.add(Entry("standard", 1, "many", sequences=14))
    assert len(started(its)) == 1
    its.add(Entry("standard", 2, "many", sequences=2, kind="unknown"))
    assert started(its) == [], "one of several does not try"
    its.add(three := Entry("realtime", 3, sequences=3))
    assert started(its) == [], "it would take more than the spare slots"
    its.add(urgent := Entry("realtime", 4))
    its.add(two := Entry("critical", 5, sequences=2))
    assert started(its) == [two]
    assert its.full
    end(its, two)
    assert started(its) == [urgent]
    end(its, next(one.entry for one in its.running if one.sequences == 14))
    assert started(its)[0] is three, "its class goes first when a slot for all is free"


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(1, 8), st.integers(1, 8))
def test_all_start_however_many_sequences_they_have(
    counts: list[int], capacity: int, general: int
) -> None:
    """Also those that have more than there are slots, in a window that is smaller still; and the
    shorter ones of another tenant do not pass them for ever.
    """
    its: Scheduler[Entry] = Scheduler(DEFAULT_RULES._replace(engine_slots=8))
    its.capacity, its.general_capacity = capacity, min(capacity, general)
    for number, sequences in enumerate(counts):
        its.add(Entry("standard", number, f"tenant-{number % 3}", sequences=sequences))
    wide = Entry("standard", 0, "wide", sequences=20)
    its.add(wide)
    done: list[Entry] = []
    for _ in range(len(counts) + 1):
        its.add(Entry("standard", 10**6, "new"))
        for entry in started(its):
            end(its, entry, CompletionStats(100 * entry.sequences))
            done.append(entry)
    assert wide in done
    assert len(set(done)) == len(done)


def test_a_tenant_pays_for_every_answer_when_it_begins() -> None:
    """And what is learnt is the length of one, and how long that takes."""
    many = Entry(tenant="many", prompt_tokens=10, max_output_tokens=50, sequences=8)
    its = scheduler(8, many)
    started(its)
    assert served_cost(its, "many") == 10 + 2 * 8 * 50
    end(its, many, CompletionStats(8 * 20))
    assert served_cost(its, "many") == 10 + 2 * 8 * 20
    assert its.lengths._shrunk(((),))[1] == 20
    assert its.lengths.predict(Entry(tenant="many", max_output_tokens=50, sequences=8)).mean < 50


def test_while_another_ingress_has_much_room_nothing_is_claimed_ahead() -> None:
    its = scheduler(8, *(Entry("standard", n) for n in range(8)))
    its.ahead = False
    first, *_ = started(its)
    end(its, first)
    assert its.wanted() == Claim(CLASSES, 1, wait=True), "one of each class for one place"
    its.add(Entry("batch", 9))
    assert its.wanted() is None, "what waits here starts now"


def test_a_request_that_ends_while_it_waits_never_starts_and_its_tenant_pays_nothing() -> None:
    hasty = [Entry(tenant="hasty", prompt_tokens=1_000) for _ in range(20)]
    last, other = Entry(tenant="hasty", accepted_ms=6), Entry(tenant="other", accepted_ms=7)
    its = scheduler(1, *hasty, last, other)
    for entry in hasty:
        assert its.drop(lambda one, entry=entry: one is entry)  # type: ignore[misc]
    assert not its.drop(lambda one: one is hasty[0])
    assert its.waiting_sequences == len(its) == 2
    assert started(its) == [last]
    assert served_cost(its, "hasty") == DEFAULT_RULES.tenants.cost(10, 256)


def served_cost(its: Scheduler[Entry], tenant: str) -> float:
    return counter(its.lines["standard"].counters, tenant)


def counter(counters: VirtualCounters, name: str) -> float:
    """What a party was served, whether it waits or not."""
    return {**counters._idle, **counters.waiting()}.get(name, 0.0)


def test_a_tenant_pays_nothing_for_requests_that_are_cancelled_before_an_attempt() -> None:
    cancelled = [Entry(tenant="hasty") for _ in range(50)]
    its = scheduler(50, *cancelled)
    for entry in started(its):
        settled = end(its, entry, CompletionStats(0, whole=False, begun=False))
        assert settled is not None
        assert settled.cost == 0
    assert served_cost(its, "hasty") == its._running_cost == 0
    assert counter(its.classes._groups, "interactive") == pytest.approx(0, abs=1e-6)
    assert its.lengths._judged == 0, "and nothing is learnt"
    its.capacity = 1
    for entry in (last := Entry(tenant="hasty", accepted_ms=6)), Entry(tenant="other"):
        its.add(entry)
    assert started(its) == [last], "it has been served no more than the other"


@pytest.mark.parametrize(
    ("tokens", "paid", "learnt"), [(3, 16.0, 0), (900, 1_810.0, 1), (None, 522.0, 0)]
)
def test_an_answer_that_is_broken_off_is_paid_and_teaches_only_that_it_is_long(
    tokens: int | None, paid: float, learnt: int
) -> None:
    """Otherwise a client that leaves early would compute for free. Without a word of what was
    written, it pays what was expected.
    """
    entry = Entry(prompt_tokens=10)
    its = scheduler(1, entry)
    started(its)
    end(its, entry, None if tokens is None else CompletionStats(tokens, whole=False))
    assert served_cost(its, "t") == paid
    assert its.lengths._judged == learnt
    its.adopt([whole := Entry()])
    end(its, whole, CompletionStats(3))
    assert its.lengths._judged == learnt + 1


@pytest.mark.parametrize("running", [0, 8_191])
def test_one_claim_never_reads_so_much_that_streams_stand_still(running: int) -> None:
    its = scheduler(8_192)
    its.adopt(Entry() for _ in range(running))
    wanted = its.wanted()
    assert wanted is not None
    assert wanted.of_each == 256


def some_work(chance: random.Random) -> list[Entry]:
    """Bursts of all classes, and some deadlines that pass."""
    at_ms, entries = 0.0, []
    for _ in range(300):
        at_ms += chance.choice((0, 0, 0, 1, 50, 2_000)) * chance.random()
        deadline_ms = int(at_ms) + chance.randint(1, 5_000) if chance.random() < 0.1 else NEVER_MS
        lengths = chance.randint(1, 500), int(chance.lognormvariate(4, 1.5)) + 1
        name, tenant = chance.choice(CLASSES), f"t{chance.randint(1, 5)}"
        kind = chance.choice("abc")
        limit = chance.choice((0, 2_000))
        entries.append(Entry(name, int(at_ms), tenant, *lengths, limit, deadline_ms, kind))
    return entries


@each("seed", range(20))
def test_no_place_is_ever_free_while_work_waits(seed: int) -> None:
    chance = random.Random(seed)
    rules = DEFAULT_RULES._replace(
        claim_ahead=chance.choice((0.25, 1.0, 4.0)),
        short_first_ms_per_cost=chance.choice((0.0, 2.0, 100.0)),
    )
    entries = some_work(chance)
    service = VirtualService(entries, chance.randint(1, 40), rules, chance.choice((300.0, 3e3)))
    served = service.run()
    assert len(served) + service.expired == len(entries)
    assert service.idle_while_waiting == 0


class Steps:
    """Counts the instructions of Python that its block executes: what it costs, without a clock."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.count += event == "opcode"
        return self._trace


def steps_of_a_decision(waiting: int) -> float:
    """With its share of an arrival and an end, while most of what waits may take no spare slot."""
    steps, decisions = Steps(), 0

    def request(number: int) -> Entry:
        name, tenant = CLASSES[2 + number % 2], f"t{number % (waiting // 20)}"
        kind, due_ms = "ab"[number % 2], 1_000 + 97 * number % 10_007
        return Entry(name, number, tenant, 20 + number % 50, deadline_ms=due_ms, kind=kind)

    its = scheduler(40, *map(request, range(waiting)))
    its.general_capacity = 35
    started(its)
    with steps:
        for number in range(200):
            its.add(request(waiting + number))
            its.wanted()
            running = next(iter(its.running))
            tokens = 100 * (10 if running.entry.kind == "a" else 1)
            its.ended(running, CompletionStats(tokens), number)
            decisions += 1 + len(started(its, number))
    assert decisions > 100
    return steps.count / decisions


def test_a_decision_costs_as_much_with_a_thousand_waiting_as_with_a_hundred() -> None:
    few, many = steps_of_a_decision(100), steps_of_a_decision(1_000)
    print(f"a decision takes {few:.0f} steps, and {many:.0f} with ten times as many waiting")
    assert many < 1.5 * few, "it grows no faster than the depth of a heap"
