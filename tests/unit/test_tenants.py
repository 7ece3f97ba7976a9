"""Tenants share a class fairly, in proportion to their weights. In virtual time."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.policy.classes import VirtualCounters
from serve_app.policy.order import Rules
from serve_app.policy.tenant_lines import TenantRules
from tests.tables import each
from tests.unit.virtual_order import Entry, Served, VirtualService, cost, seeds

CAPACITY, SPEED = 8, 1_000.0
RATE = CAPACITY * SPEED
SEEDS = seeds(1, 2, 3)


def backlog(seed: int, lengths: dict[str, int]) -> list[Entry]:
    """Requests of tenants with these mean outputs, all there from the beginning, mixed."""
    chance = random.Random(seed)
    entries = [
        Entry("standard", 0, tenant, chance.randint(1, length), chance.randint(1, 2 * length))
        for tenant, length in lengths.items()
        for _ in range(2_000)
    ]
    chance.shuffle(entries)
    return entries


def got(served: list[Served], until_ms: float) -> Counter[str]:
    """The cost of what each tenant was served until then; of what was running, the part."""
    total: Counter[str] = Counter()
    for one in served:
        if one.start_ms < until_ms:
            part = (min(one.end_ms, until_ms) - one.start_ms) / (one.end_ms - one.start_ms)
            total[one.entry.tenant] += int(part * cost(one.entry))
    return total


@pytest.mark.parametrize("seed", SEEDS)
@each(
    "lengths, weight, wanted, within, until_ms",
    [
        ({"a": 100, "b": 100}, 4.0, 0.8, 0.02, 15_000),
        ({"a": 500, "b": 50}, 1.0, 0.5, 0.05, 12_000),  # ten times longer requests
    ],
)
def test_tenants_share_by_weight_whatever_their_requests_lengths(
    seed: int, lengths: dict[str, int], weight: float, wanted: float, within: float, until_ms: int
) -> None:
    rules = Rules(tenants=TenantRules({"a": weight}), claim_ahead=64)
    service = VirtualService(backlog(seed, lengths), CAPACITY, rules)
    found = got(service.run(until_ms), until_ms)
    share = found["a"] / found.total()
    print(f"of {lengths} the first, with weight {weight:g}, got {100 * share:.1f} %")
    assert abs(share - wanted) <= within


@pytest.mark.parametrize("seed", SEEDS)
def test_a_noisy_tenant_does_not_delay_a_light_one(seed: int) -> None:
    chance = random.Random(seed)

    def poisson(tenant: str, load: float) -> list[Entry]:
        at_s, entries = 0.0, []
        while (at_s := at_s + chance.expovariate(load * RATE / 300)) < 120:
            lengths = chance.randint(1, 199), chance.randint(1, 199)
            entries.append(Entry("standard", int(at_s * 1000), tenant, *lengths))
        return entries

    others = [entry for n in range(8) for entry in poisson(f"other-{n}", 0.07)]
    light = poisson("light", 0.034)
    p99_ms = []
    for noise in (0.034, 0.34):
        served = VirtualService([*others, *light, *poisson("noisy", noise)], CAPACITY).run()
        waits = sorted(one.wait_ms for one in served if one.entry.tenant == "light")
        p99_ms.append(waits[int(0.99 * len(waits))])
    a_request_ms = 1000 * 300 / SPEED
    print(
        f"p99 of the light tenant's wait: {p99_ms[0]:.0f} ms, beside the noisy {p99_ms[1]:.0f} ms"
    )
    assert p99_ms[1] <= max(1.2 * p99_ms[0], p99_ms[0] + a_request_ms)


@given(
    st.lists(
        st.tuples(st.sampled_from(["begins", "ends", "served"]), st.sampled_from("abc")),
        max_size=80,
    )
)
def test_counters_of_those_that_wait_never_differ_by_more_than_the_largest_cost(
    steps: list[tuple[str, str]],
) -> None:
    """Whoever comes and goes, whatever is served to the one that was served least."""
    largest = 10.0
    counters = VirtualCounters({"a": 2.0})
    for number, (what, name) in enumerate(steps):
        if what == "begins":
            counters.begins(name)
        elif what == "ends":
            counters.ends(name)
        elif counters.waiting():
            counters.charge(counters.least(), 1.0 + number % largest)
        values = counters.waiting().values()
        assert not values or max(values) - min(values) <= largest


def test_nobody_saves_up_while_sending_nothing() -> None:
    counters = VirtualCounters({})
    counters.begins("busy")
    counters.charge("busy", 1_000)
    counters.begins("new")
    assert counters.waiting() == {"new": 1_000, "busy": 1_000}
    counters.charge("new", 5)
    counters.ends("new")
    counters.charge("busy", 1)
    counters.begins("new")
    assert counters.waiting()["new"] == 1_005, "what it was served is not forgotten"


def test_tenants_without_requests_are_forgotten_in_the_end() -> None:
    counters = VirtualCounters({})
    for number in range(5_000):
        counters.begins(f"t{number}")
        counters.ends(f"t{number}")
    assert len(counters._idle) <= 1_000
