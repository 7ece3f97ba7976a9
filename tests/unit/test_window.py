"""How many sequences an engine may run, and what follows in virtual time on modelled engines."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import msgspec
import pytest

from scripts.benchmark.report import percentile
from scripts.simulation.engine_model import load_engine
from scripts.simulation.presets import PRESETS, Plan
from scripts.simulation.service import Cluster, Outcome, VirtualService, simulate
from scripts.simulation.workloads import Kind, Lengths, open_loop, poisson
from serve_app.contract import EngineReport, IngressLease
from tests.unit.virtual_order import seeds
from workers.replica import Window

KV, MOST = 10_000, 128
WARM_S = 15.0


def report(used: float, running: int, waiting: int = 0, preemptions: int = 0) -> EngineReport:
    return EngineReport("e", KV, 4096, int(used * KV), running, waiting, preemptions)


def test_a_window_shrinks_once_by_what_runs_and_grows_again_while_it_is_used() -> None:
    its = Window(MOST)
    assert (its.slots, its.size) == (128, 112)
    its.reported(report(1.0, 60, 20, preemptions=1))
    assert its.size == 45
    its.reported(report(1.0, 60, 20, preemptions=2))
    assert its.size == 45, "what was started before still runs"
    for _ in range(20):
        its.reported(report(0.5, 45, preemptions=2))
    assert its.size > 45
    grown = its.size
    its.reported(report(0.5, 10, preemptions=2))
    assert its.size == grown, "it is not used"
    its.reported(report(0.9, 128, preemptions=2))
    assert its.size == grown, "the cache is"
    for _ in range(100):
        its.reported(report(0.5, 128, preemptions=2))
    assert its.slots == MOST


def test_sequences_that_wait_in_the_engine_shrink_it_if_they_wait_for_two_readings() -> None:
    its = Window(MOST)
    for waiting in (50, 0, 50, 0):
        its.reported(report(0.6, 100, waiting))
    assert its.slots == MOST
    for _ in range(2):
        its.reported(report(0.6, 100, 50))
    assert its.size == 75


def test_sequences_that_wait_for_their_prefill_do_not_shrink_it() -> None:
    its = Window(MOST)
    for _ in range(10):
        its.reported(report(0.4, 20, 50))
    assert its.slots == MOST


def test_sequences_that_wait_for_a_slot_do_not_shrink_it() -> None:
    """Those of a request of 16 that started in the last one."""
    its = Window(MOST)
    for _ in range(10):
        its.reported(report(0.6, MOST, 15))
    assert its.slots == MOST
    for _ in range(2):
        its.reported(report(0.6, MOST - 1, 15))
    assert its.slots < MOST


def test_an_engine_that_is_started_again_or_keeps_no_kv_has_its_slots() -> None:
    its = Window(MOST)
    its.reported(report(0.5, 1, preemptions=0))
    its.reported(EngineReport("encoder", 0, 512, 0, 200, 300, 0))
    assert its.slots == MOST
    alone = Window(1)
    assert (alone.slots, alone.size) == (1, 1)
    alone.reported(report(1.0, 1, 9, preemptions=1))
    assert alone.slots == 1


def plan(name: str, seed: int, ingresses: int = 1, engine: str = "tiny-cpu") -> Plan:
    chosen = PRESETS[name]
    return chosen.make(Cluster(load_engine(engine), 1, chosen.slots, ingresses), seed)


def run(its: Plan, policy: str = "hermes") -> Outcome:
    return simulate(its.cluster, its.sources, policy, its.until_s)


def preempted(outcome: Outcome) -> float:
    """The share of the requests."""
    begun = [one for one in outcome.records if one.started_s is not None]
    return sum(one.preemptions > 0 for one in begun) / len(begun)


def waiting_inside(outcome: Outcome) -> float:
    """Sequences that wait in the engine: the median over time."""
    (engine,) = outcome.engines
    samples = engine.samples
    return median(
        waits
        for (now_s, _, _, waits), (next_s, *_) in pairwise(samples)
        for _ in range(round(100 * (next_s - now_s)))
        if now_s >= WARM_S
    )


def ttft_s(outcome: Outcome, percent: float, *of: str) -> float:
    return percentile(
        [
            one.ttft_s
            for one in outcome.records
            if one.first_token_s is not None
            and (not of or one.work.request_class in of or one.work.tenant in of)
        ],
        percent,
    )


def tokens(outcome: Outcome) -> int:
    return sum(one.tokens for one in outcome.records)


@pytest.mark.parametrize("seed", seeds(1, 2, 3))
@pytest.mark.parametrize("preset", ["kv-bound", "long-prompts"])
def test_what_has_no_room_waits_outside_of_the_engine_at_no_cost(preset: str, seed: int) -> None:
    its = plan(preset, seed)
    order, oldest = run(its), run(its, "fcfs")
    print(
        f"{preset}, seed {seed}: waiting inside {waiting_inside(order):.0f} "
        f"(first come, first served {waiting_inside(oldest):.0f}), preempted "
        f"{preempted(order):.1%} ({preempted(oldest):.1%}), tokens × "
        f"{tokens(order) / tokens(oldest):.3f}, TTFT p50 × "
        f"{ttft_s(order, 50) / ttft_s(oldest, 50):.3f}"
    )
    assert preempted(oldest) > 0.1, "there is memory for all, so nothing is tested"
    assert waiting_inside(oldest) > 10
    assert waiting_inside(order) <= 2
    assert preempted(order) <= 0.05
    assert tokens(order) >= 0.98 * tokens(oldest)
    assert ttft_s(order, 50) <= 1.05 * ttft_s(oldest, 50)


@pytest.mark.parametrize("seed", seeds(1, 2, 3))
def test_urgent_requests_do_not_wait_for_batch_requests_that_fill_the_memory(seed: int) -> None:
    """An engine holds three of the batch requests."""
    its = plan("held-batch", seed)
    order, oldest = run(its), run(its, "fcfs")
    found = [ttft_s(order, 99, name) for name in ("critical", "realtime")]
    print(
        f"seed {seed}: TTFT p99 critical {found[0]:.2f} s, realtime {found[1]:.2f} s, preempted "
        f"{preempted(order):.1%}, tokens × {tokens(order) / tokens(oldest):.3f}"
    )
    assert max(found) < 0.8
    assert waiting_inside(order) <= 2
    assert preempted(order) < 0.6 * preempted(oldest)
    assert tokens(order) >= 0.97 * tokens(oldest)


def among_long(seed: int, rate_per_s: float, long_tokens: int) -> tuple[Plan, Plan]:
    """Half as many long answers again as there are slots, and short requests of half a second; and
    the short ones alone.
    """
    engine = load_engine("estimate-h100-llama-8b")
    engine = msgspec.structs.replace(engine, num_gpu_blocks=600_000, max_model_len=110_000)
    cluster = Cluster(engine, 1, 64)
    long = Kind(Lengths(100, 1.0), Lengths(long_tokens, 1.0), tenant="long")
    short = Kind(Lengths(60, 1.5, 300), Lengths(40, 1.5, 200), tenant="short")
    long_ones = open_loop([0.01 * number for number in range(96)], long, f"{seed}/long")
    short_ones = open_loop(poisson(rate_per_s, 60, f"{seed}/short"), short, f"{seed}/short")
    return Plan(cluster, [long_ones, short_ones], 60), Plan(cluster, [short_ones], 60)


@pytest.mark.parametrize("seed", seeds(1, 2, 3))
@pytest.mark.parametrize("long_tokens", [3_500, 100_000])
def test_while_spare_slots_last_short_requests_wait_for_no_long_answer(
    seed: int, long_tokens: int
) -> None:
    """Seven of 64 slots are left to them, because one of the eight has a long answer that tries.
    What is left of the difference to being alone is the longer steps of an engine that has more to
    do.
    """
    among, alone = among_long(seed, 3.0, long_tokens)
    order, oldest, quiet = run(among), run(among, "fcfs"), run(alone)
    for outcome in (order, oldest, quiet):  # until the first has ended, one at a time tries
        outcome.records[:] = [one for one in outcome.records if one.arrived_s > 5]
    short = [one for one in order.records if one.work.tenant == "short"]
    wait_ms = 1e3 * percentile([one.wait_s for one in short if one.started_s is not None], 99)
    ttft_ms = [1e3 * ttft_s(one, 99, "short") for one in (order, oldest, quiet)]
    print(
        f"{long_tokens} tokens, seed {seed}: p99 of the wait {wait_ms:.1f} ms, of TTFT "
        f"{ttft_ms[0]:.0f} ms, first come, first served {ttft_ms[1]:.0f} ms, alone "
        f"{ttft_ms[2]:.0f} ms"
    )
    assert len(short) > 100
    assert all(one.first_token_s is not None for one in short if one.arrived_s < 59)
    assert wait_ms < 2
    assert not ttft_ms[1] < 20 * ttft_ms[0], "without spare slots they wait"


@pytest.mark.parametrize("seed", seeds(1, 2, 3))
def test_many_answers_to_one_request_hold_others_up_no_more_than_as_many_requests(
    seed: int,
) -> None:
    """One tenant always asks for four times as many long answers as the engine has slots for all;
    five others chat. The spare slots are theirs.
    """
    waits_s, ttfts_s, written = [], [], []
    for name in ("many-answers", "many-requests"):
        outcome = run(plan(name, seed, engine="estimate-h100-llama-8b")._replace(until_s=60))
        chats = [one for one in outcome.records if one.work.tenant != "many"]
        begun = [one for one in chats if one.first_token_s is not None]
        assert len(begun) > 0.9 * len(chats)
        waits_s.append(percentile([one.wait_s for one in begun], 50))
        ttfts_s.append(percentile([one.ttft_s for one in begun], 90))
        written.append(tokens(outcome))
    print(
        f"seed {seed}: p50 of the chats' wait {waits_s[0]:.2f} s (as many requests "
        f"{waits_s[1]:.2f}), p90 of TTFT {ttfts_s[0]:.2f} s ({ttfts_s[1]:.2f}), tokens × "
        f"{written[0] / written[1]:.3f}"
    )
    assert waits_s[0] == 0
    assert ttfts_s[0] < 2 * ttfts_s[1] + 1
    assert written[0] >= 0.95 * written[1]


def test_a_seed_gives_the_same_figures_again_also_with_several_ingresses() -> None:
    cluster = Cluster(load_engine("tiny-cpu"), replicas=2, ingresses=2)
    plans = [PRESETS["kv-bound"].make(cluster, 1) for _ in range(2)]
    first, again = (simulate(plan.cluster, plan.sources, "hermes", 30) for plan in plans)
    assert first.records == again.records


@pytest.mark.parametrize("model", ["other", "model"])
def test_another_model_in_the_namespace_takes_no_capacity(model: str) -> None:
    """An ingress of the same one gets its share."""
    its = plan("kv-bound", 1)
    greedy = IngressLease("other", "session-1", True, its.cluster.slots, 500, model=model)

    async def appears(service: VirtualService) -> None:
        service.beside = (greedy,)

    alone = simulate(its.cluster, its.sources, until_s=30)
    again = plan("kv-bound", 1)
    beside = simulate(again.cluster, [appears, *again.sources], until_s=30)
    assert (beside.records == alone.records) == (model == "other")
