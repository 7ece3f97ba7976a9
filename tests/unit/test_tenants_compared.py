"""Virtual token counters beside deficit round robin, which serves a tenant for a whole quantum
(D²LPM's form: it keeps the requests of one tenant, and their common prefixes, together).
"""

from __future__ import annotations

import random
from collections import OrderedDict
from itertools import pairwise

import pytest

from serve_app.policy.fairness import VirtualCounters
from serve_app.policy.order import Rules
from tests.unit.virtual_order import Entry, Served, VirtualService, cost

pytestmark = pytest.mark.nightly  # with an order of work that is not ours

CAPACITY, SPEED = 8, 1_000.0


class DeficitRounds(VirtualCounters):
    """Each tenant in turn is served until it has used up its quantum."""

    def __init__(self, quantum: float) -> None:
        super().__init__({})
        self._quantum = quantum
        self._deficits: OrderedDict[str, float] = OrderedDict()

    def begins(self, name: str, credit: float = 0.0) -> None:
        self._deficits.setdefault(name, self._quantum)

    def ends(self, name: str) -> None:
        self._deficits.pop(name, None)

    def charge(self, name: str, cost: float) -> None:
        if name in self._deficits:
            self._deficits[name] -= cost

    def least(self) -> str:
        while True:
            name, deficit = next(iter(self._deficits.items()))
            if deficit > 0:
                return name
            self._deficits.move_to_end(name)
            self._deficits[name] += self._quantum


def load(seed: int) -> list[Entry]:
    """Four tenants with far more than the engine can do, and one with a request now and then."""
    chance, entries = random.Random(seed), []
    for tenant, length in {"a": 50, "b": 100, "c": 200, "d": 400}.items():
        for _ in range(500):
            lengths = chance.randint(1, length), chance.randint(1, length)
            entries.append(Entry("standard", 0, tenant, *lengths))
    chance.shuffle(entries)
    light = [Entry("standard", 500 + 400 * n, "light", 20, 50) for n in range(50)]
    return [*entries, *light]


def figures(served: list[Served]) -> tuple[float, float, float]:
    """Largest difference of two backlogged tenants' cost, p90 of the light one's wait, and the part
    of requests that follow one of the same tenant.
    """
    total = dict.fromkeys("abcd", 0.0)
    most = 0.0
    for one in served:
        if one.entry.tenant in total:
            total[one.entry.tenant] += cost(one.entry)
            most = max(most, max(total.values()) - min(total.values()))
    waits = sorted(one.wait_ms for one in served if one.entry.tenant == "light")
    same = [a.entry.tenant == b.entry.tenant for a, b in pairwise(served)]
    return most, waits[int(0.9 * len(waits))], sum(same) / len(same)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_counters_are_fairer_and_quicker_and_deficits_keep_tenants_together(seed: int) -> None:
    found = {}
    for name, counters in {
        "counters": VirtualCounters({}),
        "deficit 1,000": DeficitRounds(1_000),
        "deficit 10,000": DeficitRounds(10_000),
    }.items():
        service = VirtualService(load(seed), CAPACITY, Rules(claim_ahead=1_000.0))
        service.scheduler.lines["standard"].counters = counters
        found[name] = most, wait_ms, together = figures(service.run(until_ms=20_000))
        print(f"{name}: difference {most:.0f}, wait {wait_ms:.0f} ms, together {together:.2f}")
    for name in ("deficit 1,000", "deficit 10,000"):
        assert found["counters"][0] <= found[name][0]
        assert found["counters"][1] <= found[name][1]
    assert found["deficit 10,000"][2] > found["counters"][2]
