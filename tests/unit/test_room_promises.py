"""What the room promises, in virtual time on modelled engines: memory is used, and hardly anything
is preempted.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from scripts.benchmark.stats import percentile
from scripts.simulation.presets import PRESETS, cluster_of
from scripts.simulation.service import Outcome
from scripts.simulation.simulate import simulate

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
    ("preset", "seed", "ingresses", "least_used"),
    [
        ("kv-bound", 1, 1, 0.85),
        pytest.param("kv-bound", 2, 1, 0.85, marks=pytest.mark.nightly),
        pytest.param("kv-bound", 1, 4, 0.82, marks=pytest.mark.nightly),
        pytest.param("long-prompts", 1, 1, 0.85, marks=pytest.mark.nightly),
        pytest.param("long-prompts", 2, 1, 0.85, marks=pytest.mark.nightly),
        pytest.param("long-prompts", 1, 4, 0.82, marks=pytest.mark.nightly),
    ],
)
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


@pytest.mark.parametrize(
    ("ingresses", "most_s"), [(1, 2.0), pytest.param(4, 8.0, marks=pytest.mark.nightly)]
)
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
