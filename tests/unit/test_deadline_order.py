"""Of a tenant's requests, one that would miss its deadline if it waited longer goes first; one that
misses it anyway pushes nobody back.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.policy.order import Rules
from serve_app.policy.prediction import ServiceTimeModel
from serve_app.policy.tenant_lines import TenantLines, TenantRules, Waiting
from tests.unit.virtual_order import NEVER_MS, Entry, Served, VirtualService, cost, seeds

CAPACITY, SPEED = 4, 1_000.0
SEEDS = seeds(1, 2, 3)


def test_the_time_of_a_request_is_learnt_by_what_it_reads_and_writes() -> None:
    chance, pace = random.Random(1), ServiceTimeModel()
    assert pace.predict_ms(1_000, 1_000) == 0
    for _ in range(200):
        prompt, output = chance.randint(1, 5_000), chance.randint(1, 500)
        pace.learn(prompt, output, (0.5 * prompt + 20 * output) * chance.uniform(0.9, 1.1))
    assert pace.predict_ms(4_000, 0) == pytest.approx(2_000, rel=0.05)
    assert pace.predict_ms(0, 100) == pytest.approx(2_000, rel=0.05)
    for _ in range(2_000):  # the engines are busier
        pace.learn(100, 100, 6_000)
    assert pace.predict_ms(100, 100) == pytest.approx(6_000, rel=0.05)
    assert pace.mean_ms == pytest.approx(6_000, rel=0.05)


TOKENS = st.integers(0, 2**17)


@given(st.lists(st.tuples(TOKENS, TOKENS, st.integers(-5, 10**7)), max_size=30), TOKENS, TOKENS)
def test_no_request_is_predicted_to_end_before_it_starts(
    ended: list[tuple[int, int, int]], prompt: int, output: int
) -> None:
    pace = ServiceTimeModel()
    for one in ended:
        pace.learn(*one)
    assert 0 <= pace.predict_ms(prompt, output) < float("inf")


WAITING = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 100) | st.just(NEVER_MS)), min_size=1, max_size=30
)


@given(WAITING, st.lists(st.integers(0, 10), max_size=30), st.integers(0, 20))
def test_of_a_tenants_requests_the_most_urgent_goes_first_that_is_not_too_late(
    waiting: list[tuple[int, int]], passes: list[int], soon_ms: int
) -> None:
    lines: TenantLines[Entry] = TenantLines(TenantRules())
    left = [Waiting(Entry(), rank_ms, latest_ms, 0) for rank_ms, latest_ms in waiting]
    for one in left:
        lines.add(one)
    now_ms = 0
    for _, passed_ms in zip(waiting, [*passes, *(7 for _ in waiting)], strict=False):
        now_ms += passed_ms
        chosen = lines.next(now_ms, soon_ms)
        urgent = [one.latest_ms for one in left if now_ms <= one.latest_ms <= now_ms + soon_ms]
        if urgent:
            assert chosen.latest_ms == min(urgent)
        else:
            assert chosen.rank_ms == min(one.rank_ms for one in left)
        lines.remove(chosen)
        left.remove(chosen)


def load(seed: int, count: int = 400, share: float = 1.0) -> list[Entry]:
    """Requests of one tenant; `share`: of what can be served."""
    chance, at_s = random.Random(seed), 0.0
    entries: list[Entry] = []
    while len(entries) < count:
        at_s += chance.expovariate(share * CAPACITY * SPEED / 250)
        entries.append(Entry("standard", int(at_s * 1000), "t", 50, 100, kind="chat"))
    return entries


def served_in_order(entries: list[Entry]) -> list[Served]:
    rules = Rules(claim_ahead=1_000.0, short_first_ms_per_cost=0.0)
    return VirtualService(entries, CAPACITY, rules, SPEED).run()


def met(served: list[Served]) -> int:
    return sum(one.end_ms < one.entry.deadline_ms for one in served)


@pytest.mark.parametrize("seed", SEEDS)
def test_more_requests_meet_their_deadlines(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each third is in a hurry, at 110 % load."""
    chance = random.Random(seed)
    entries = [
        replace(one, deadline_ms=one.accepted_ms + chance.choice((2_000, 60_000, 60_000)))
        for one in load(seed, 1_200, 1.1)
    ]
    in_order = served_in_order(entries)
    monkeypatch.setattr(ServiceTimeModel, "learn", lambda *_: None)
    by_age = served_in_order(entries)
    assert met(by_age) < 0.97 * len(entries)
    print(f"met {met(by_age)} → {met(in_order)} of {len(entries)}")
    assert len(entries) - met(in_order) <= 0.5 * (len(entries) - met(by_age))


@pytest.mark.parametrize("seed", SEEDS)
def test_requests_that_are_too_late_push_nobody_back(seed: int) -> None:
    """Their deadlines are shorter than they run: others start when they would if these had none."""
    entries, hopeless = load(seed, share=1.1), {}
    for number in range(50, 400, 5):
        late = entries[number]
        hopeless[number] = replace(late, deadline_ms=late.accepted_ms + int(cost(late) * 0.9))
    orders = []
    for deadline_ms in (0, NEVER_MS):
        of_late = {
            number: replace(one, deadline_ms=deadline_ms or one.deadline_ms)
            for number, one in hopeless.items()
        }
        both = [of_late.get(number, one) for number, one in enumerate(entries)]
        late_ids = set(map(id, of_late.values()))
        served = [one for one in served_in_order(both) if id(one.entry) not in late_ids]
        orders.append({one.entry.accepted_ms: one.start_ms for one in served})
    assert list(orders[0]) == list(orders[1]) == sorted(orders[1])
    assert all(orders[0][at_ms] <= orders[1][at_ms] + 1 for at_ms in orders[0])
