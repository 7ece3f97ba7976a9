"""LengthModel are learnt, predictions are honest about themselves, and they do no harm."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import mean

import pytest

from serve_app.policy.order import DEFAULT_RULES, Rules
from serve_app.policy.prediction import LengthModel
from tests.unit.virtual_order import Entry, VirtualService, seeds

CAPACITY = 8
KINDS = {f"kind-{number}": 20 * 1.25**number for number in range(20)}
"""The middle of the lengths of each."""
FIFO = Rules(short_first_ms_per_cost=0.0)


class Oracle(LengthModel):
    """Knows every length before it is written."""

    useful = True

    def predict(self, request: Entry):  # type: ignore[no-untyped-def, override]
        return super().predict(request)._replace(mean=request.output_tokens)


def mixed(seed: int, spread: float, kinds: dict[str, float] = KINDS) -> list[Entry]:
    """Requests of one tenant at 90 % load; `spread`: of lengths within a kind."""
    chance, at_s, entries = random.Random(seed), 0.0, []
    middle = mean(2 * length * math.exp(spread**2 / 2) + 50 for length in kinds.values())
    while at_s < 400:
        at_s += chance.expovariate(0.9 * CAPACITY * 1_000 / middle)
        name, length = chance.choice(list(kinds.items()))
        tokens = max(1, int(chance.lognormvariate(math.log(length), spread)))
        entries.append(Entry("standard", int(at_s * 1000), "t", 50, tokens, kind=name))
    return entries


def wide(rules: Rules) -> Rules:
    """With all that waits within reach, so that only the order differs."""
    return rules._replace(claim_ahead=1_000.0)


def waits(entries: list[Entry], rules: Rules, lengths: LengthModel | None = None) -> list[float]:
    service = VirtualService(entries, CAPACITY, wide(rules))
    if lengths is not None:
        service.scheduler.lengths = lengths
    return sorted(one.wait_ms for one in service.run())


@pytest.mark.parametrize("seed", seeds(1, 2, 3))
def test_knowing_the_kinds_gains_most_of_what_an_oracle_gains(seed: int) -> None:
    entries = mixed(seed, spread=0.5)
    oldest, learnt = mean(waits(entries, FIFO)), mean(waits(entries, DEFAULT_RULES))
    oracle = mean(waits(entries, DEFAULT_RULES, Oracle()))
    gained = (oldest - learnt) / (oldest - oracle)
    print(f"mean wait {oldest:.0f} ms → {learnt:.0f}, oracle {oracle:.0f}: {100 * gained:.0f} %")
    assert gained >= 0.6


@pytest.mark.parametrize("seed", seeds(1, 2, 3))
def test_where_nothing_can_be_learnt_the_oldest_goes_first(seed: int) -> None:
    entries = mixed(seed, spread=1.0, kinds=dict.fromkeys(KINDS, 200.0))
    service = VirtualService(entries, CAPACITY, wide(DEFAULT_RULES))
    served = sorted(one.wait_ms for one in service.run())
    oldest = waits(entries, FIFO)
    p99 = int(0.99 * len(oldest))
    print(f"mean {mean(served) / mean(oldest):.3f} ×, p99 {served[p99] / oldest[p99]:.3f} ×")
    assert not service.scheduler.lengths.useful
    assert mean(served) <= 1.02 * mean(oldest)
    assert served[p99] <= 1.1 * oldest[p99]


def test_a_group_that_has_seen_little_leans_on_the_coarser_one() -> None:
    lengths = LengthModel()
    for number in range(300):
        entry = Entry(tenant=f"old-{number % 3}", kind="chat")
        lengths.learn(entry, lengths.predict(entry), 1_000)
    new = Entry(tenant="new", kind="chat")
    assert 800 < lengths.predict(new).mean < 1_001
    for _ in range(3):
        lengths.learn(new, lengths.predict(new), 10)
    after_three = lengths.predict(new).mean
    for _ in range(100):
        lengths.learn(new, lengths.predict(new), 10)
    assert 10 <= lengths.predict(new).mean < 200 < after_three < 1_000
    assert lengths.predict(replace(new, max_output_tokens=5)).mean <= 5


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.policy.prediction._GROUPS", 100)
    lengths = LengthModel()
    for number in range(300):
        entry = Entry(tenant=f"tenant-{number}", kind="chat")
        lengths.learn(entry, lengths.predict(entry), 9)
    assert len(lengths._groups) == 100
    assert () in lengths._groups


def test_a_long_prompt_starts_long_before_its_deadline_however_many_short_requests_come() -> None:
    """At 120 % load, where more and more requests wait."""
    overload = [replace(one, accepted_ms=int(0.75 * one.accepted_ms)) for one in mixed(1, 0.5)]
    long = Entry("standard", 30_000, "t", 100_000, 1, deadline_ms=150_000, kind="kind-0")
    service = VirtualService([*overload, long], CAPACITY, wide(DEFAULT_RULES))
    service.run()
    (found,) = [one for one in service.served if one.entry is long]
    passed = [one for one in service.served if one.entry.accepted_ms > long.accepted_ms]
    assert service.scheduler.lengths.useful
    assert any(one.start_ms < found.start_ms for one in passed), "short ones go before it"
    print(f"waits {found.wait_ms / 1000:.0f} s of 120 s")
    assert found.wait_ms <= 60_000, "a quarter of its time, and what was there before"


def test_what_is_short_is_known_when_something_like_it_has_ended() -> None:
    lengths = LengthModel()
    long, short = Entry(tenant="long", kind="chat"), Entry(tenant="short", kind="chat")
    assert lengths.short(long) is lengths.short(short) is None
    assert lengths.short(replace(long, max_output_tokens=16)), "by its limit"
    for _ in range(50):
        lengths.learn(long, lengths.predict(long), 4_000)
        lengths.learn(short, lengths.predict(short), 40)
    assert (lengths.short(long), lengths.short(short)) == (False, True)
    assert lengths.short(Entry(tenant="new", kind="chat")) is None
    alike = LengthModel()
    for _ in range(50):
        alike.learn(long, alike.predict(long), 4_000)
    assert alike.short(long), "where all are alike, none is long"
