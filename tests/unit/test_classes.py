"""Classes share the engines by weight, age, and wait for a bounded time. In virtual time."""

from __future__ import annotations

import random
from statistics import mean

import pytest

from serve_app.policy.classes import ClassOrder, ClassRules
from serve_app.policy.order import Rules
from tests.unit.virtual_order import Entry, Served, VirtualService, cost, seeds

CAPACITY, SPEED = 8, 1_000.0
RATE = CAPACITY * SPEED
"""Cost that the engine serves per second when all its places are taken."""
SEEDS = seeds(1, 2, 3)
STEP_MS = 25
"""Of an engine: a decode step with a full batch."""


def requests(
    chance: random.Random, request_class: str, per_s: float, until_s: float, tenant: str = "t"
) -> list[Entry]:
    """Poisson arrivals of mixed lengths."""
    at_s, entries = chance.expovariate(per_s), []
    while at_s < until_s:
        lengths = chance.randint(1, 200), chance.randint(1, 300)
        entries.append(Entry(request_class, int(at_s * 1000), tenant, *lengths))
        at_s += chance.expovariate(per_s)
    return entries


def share(served: list[Served], *classes: str) -> float:
    """The part of all cost that these classes got."""
    theirs = sum(cost(one.entry) for one in served if one.entry.request_class in classes)
    return theirs / sum(cost(one.entry) for one in served)


def backlog(seed: int, *classes: str) -> list[Entry]:
    """Far more work of each class than the engine can do."""
    chance = random.Random(seed)
    return [entry for name in classes for entry in requests(chance, name, 40, 60)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("wanted", "interactive"), [(0.7, "realtime"), (0.3, "standard")])
def test_interactive_and_batch_share_by_weight_while_both_wait(
    seed: int, wanted: float, interactive: str
) -> None:
    rules = Rules(ClassRules(interactive_share=wanted))
    service = VirtualService(backlog(seed, interactive, "batch"), CAPACITY, rules)
    found = share(service.run(until_ms=60_000), interactive)
    print(f"interactive {100 * found:.1f} % of the cost, wanted {100 * wanted:.0f} %")
    assert abs(found - wanted) < 0.02
    assert not service.idle_while_waiting


@pytest.mark.parametrize("seed", SEEDS)
def test_whoever_waits_alone_gets_everything(seed: int) -> None:
    """Interactive work that takes 60 % leaves 40 %, and batch gets at least 90 % of that."""
    chance = random.Random(seed)
    a_request = mean(cost(entry) for entry in backlog(seed, "realtime"))
    some = requests(chance, "realtime", 0.6 * RATE / a_request, 60)
    service = VirtualService([*some, *backlog(seed, "batch")], CAPACITY)
    served = service.run(until_ms=60_000)
    left = 1 - share(served, "realtime")
    print(f"batch got {100 * left:.1f} % of the cost")
    assert left * RATE * 60 >= 0.9 * (RATE * 60 - sum(map(cost, some)))
    assert not service.idle_while_waiting
    alone = VirtualService(backlog(seed, "batch"), CAPACITY)
    assert share(alone.run(until_ms=60_000), "batch") == 1
    assert not alone.idle_while_waiting


def bound_s(ahead: float, largest: float, request_class: str, rules: ClassRules) -> float:
    """The formulas in docs/evidence/order-of-work.md."""
    if request_class == "batch":
        shared = (ahead + 2 * largest) / (1 - rules.interactive_share)
        return (shared + (rules.interactive_credit + 1) * CAPACITY * largest) / RATE
    interactive = (ahead + 2 * largest) / rules.aged_share
    shared = (interactive + 2 * largest) / rules.interactive_share
    return rules.ageing_s + (shared + CAPACITY * largest) / RATE


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("request_class", ["standard", "batch"])
def test_an_endless_flood_of_more_urgent_work_delays_a_class_by_a_bounded_time(
    seed: int, request_class: str
) -> None:
    rules = ClassRules(ageing_s=2.0)
    chance = random.Random(seed)
    others = [name for name in ("realtime", "standard", "batch") if name != request_class]
    flood = [entry for name in others for entry in requests(chance, name, 80, 120)]
    few = requests(chance, request_class, 1.5, 60)
    served = VirtualService([*flood, *few], CAPACITY, Rules(rules)).run(until_ms=120_000)
    theirs = [one for one in served if one.entry.request_class == request_class]
    assert len(theirs) == len(few)
    largest = max(cost(one.entry) for one in served)
    part = []
    for one in theirs:
        before = [cost(a.entry) for a in theirs if a.start_ms < one.start_ms]
        ahead = sum(before[-sum(a.end_ms > one.entry.accepted_ms for a in theirs) :])
        waited_for = [
            cost(a.entry) for a in theirs if one.entry.accepted_ms <= a.start_ms < one.start_ms
        ]
        assert sum(waited_for) <= ahead + largest
        part.append(one.wait_ms / 1000 / bound_s(sum(waited_for), largest, request_class, rules))
    print(f"{request_class}: longest wait {100 * max(part):.0f} % of its bound")
    assert max(part) <= 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_flood_of_batch_does_not_delay_realtime(seed: int) -> None:
    """An engine with 64 places: a realtime request waits for the first of them to become free."""
    chance, places = random.Random(seed), 64
    a_request = mean(cost(entry) for entry in backlog(seed, "realtime"))
    few = requests(chance, "realtime", 0.5 * places * SPEED / a_request, 20)
    flood = [Entry("batch", 5_000, "b", 50, chance.randint(1, 200)) for _ in range(5_000)]
    waits = []
    for load in (few, [*few, *flood]):
        served = VirtualService(load, places).run()
        ordered = sorted(one.wait_ms for one in served if one.entry.request_class == "realtime")
        waits.append(ordered[int(0.99 * len(ordered))])
    print(f"p99 of the wait {waits[0]:.0f} ms alone, {waits[1]:.0f} ms beside 5,000 of batch")
    assert waits[1] <= max(1.1 * waits[0], 2 * STEP_MS)


def test_an_absurd_estimate_holds_nobody_back_for_long() -> None:
    batch = [Entry("batch", number, output_tokens=450) for number in range(3_000)]
    chats = [Entry("realtime", 100 * number, output_tokens=200) for number in range(1_000)]
    absurd = Entry("realtime", 20_000, "other", prompt_tokens=2**31 - 1)
    its = VirtualService([*batch, *chats, absurd])
    waits = [one.wait_ms for one in its.run(200_000) if one.entry in chats]
    assert len(waits) == len(chats)
    assert max(waits) < 60_000


def test_only_age_promotes_a_standard_request_not_a_spare_slot() -> None:
    classes = ClassOrder(ClassRules(ageing_s=10.0))
    oldest_ms = {"realtime": 0, "standard": 0}
    classes.starts("standard", oldest_ms, now_ms=9_999)
    assert classes.promotions == 0
    classes.starts("standard", oldest_ms, now_ms=10_000)
    classes.starts("realtime", oldest_ms, now_ms=10_000)
    assert classes.promotions == 1
