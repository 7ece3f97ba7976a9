"""What the room promises, in virtual time on modelled engines: memory is used, and hardly anything
is preempted; and what the decision costs.
"""

from __future__ import annotations

import random
import time
from itertools import pairwise

import pytest

from scripts.benchmark.stats import percentile
from scripts.simulation.presets import PRESETS, cluster_of
from scripts.simulation.service import Outcome
from scripts.simulation.simulate import simulate
from serve_app.contract import EngineReport, Written
from serve_app.policy.classes import CLASSES
from serve_app.policy.order import Scheduler
from tests.unit.virtual_order import Entry

WARM_S = 60.0


def run(name: str, seed: int, ingresses: int = 1, policy: str = "hermes") -> Outcome:
    chosen = PRESETS[name]
    its = chosen.make(cluster_of(chosen, "tiny-cpu", 1, 0, ingresses), seed)
    return simulate(its.cluster, its.sources, policy, its.until_s)


def preempted(outcome: Outcome) -> float:
    """The share of the requests."""
    begun = [one for one in outcome.records if one.started_s is not None]
    return sum(one.preemptions > 0 for one in begun) / len(begun)


def means(outcome: Outcome) -> tuple[float, float]:
    """Share of the KV used, and requests that wait in the engine: means over time."""
    time_s = used = waiting = 0.0
    for engine in outcome.engines:
        for (now_s, share, _, waits), (next_s, *_) in pairwise(engine.samples.taken):
            if now_s >= WARM_S:
                time_s += next_s - now_s
                used += share * (next_s - now_s)
                waiting += waits * (next_s - now_s)
    return used / time_s, waiting / time_s


@pytest.mark.parametrize(
    ("seed", "ingresses", "least_used"), [(1, 1, 0.85), (2, 1, 0.85), (1, 4, 0.82)]
)
@pytest.mark.parametrize("preset", ["kv-bound", "long-prompts"])
def test_the_memory_is_used_and_hardly_anything_is_preempted(
    preset: str, seed: int, ingresses: int, least_used: float
) -> None:
    outcome = run(preset, seed, ingresses)
    oldest = run(preset, seed, policy="fcfs")
    used, waiting = means(outcome)
    print(
        f"{preset}, {ingresses} ingresses: preempted {preempted(outcome):.2%} "
        f"(first come, first served: {preempted(oldest):.2%}), KV used {used:.1%}, "
        f"{waiting:.1f} wait in the engine"
    )
    assert preempted(oldest) > 0.1, "there is memory for all, so nothing is tested"
    assert preempted(outcome) < 0.01
    assert used >= least_used
    assert waiting <= 2


@pytest.mark.parametrize(("ingresses", "most_s"), [(1, 2.0), (4, 8.0)])
def test_urgent_requests_do_not_wait_for_a_batch_request_that_waits_for_room(
    ingresses: int, most_s: float
) -> None:
    """An engine holds three of the batch requests, and an ingress's share is less than one."""
    records = run("held-batch", 1, ingresses).records
    for name in ("critical", "realtime"):
        waits = [
            one.wait_s
            for one in records
            if one.work.request_class == name and one.started_s is not None
        ]
        p50, p99 = percentile(waits, 50), percentile(waits, 99)
        print(f"{ingresses} ingresses, {name}: p50 {p50:.2f} s, p99 {p99:.2f} s")
        assert p50 < 0.6
        assert p99 < most_s
    assert sum(one.work.request_class == "batch" and one.answered for one in records) > 200


def test_a_decision_takes_less_than_20_us_with_1000_waiting_and_50_tenants() -> None:
    """The least of several rounds: the machine may do something else in the others."""
    rng = random.Random(1)
    its = Scheduler[Entry]()
    its.capacity = 200
    engines = [EngineReport("e", 60_000, 4096)]
    its.room_changed(engines, 60_000, 0)
    rounds_us: list[float] = []
    now_ms = 0
    for _ in range(30):
        while len(its) < 1_000:
            tenant, request_class = f"t{rng.randrange(50)}", rng.choice(CLASSES[1:])
            its.add(Entry(request_class, now_ms, tenant, rng.randrange(20, 2_000)))
        decisions = 0
        began_s = time.thread_time()
        while its.next(now_ms) is not None:
            decisions += 1
        took_s = time.thread_time() - began_s
        rounds_us.append(1e6 * took_s / (decisions + 1))
        for running in list(its.running)[:20]:
            its.ended(running, Written(rng.randrange(10, 400)), now_ms + 100)
        its.room_changed(engines, 60_000, 0)
        now_ms += 100
    print(
        f"a decision takes {min(rounds_us):.1f} µs, the median {percentile(rounds_us, 50):.1f} µs"
    )
    assert its.overtaking.short, "nothing waits for room, so nothing is tested"
    assert min(rounds_us) < 20
