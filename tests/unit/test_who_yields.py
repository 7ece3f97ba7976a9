"""Which running request gives its place to a waiting one, and what comes of it in virtual time."""

from __future__ import annotations

import pytest

from scripts.benchmark.stats import percentile
from scripts.simulation.figures import slot_times
from scripts.simulation.presets import PRESETS, cluster_of
from scripts.simulation.service import Outcome
from scripts.simulation.simulate import simulate
from serve_app.contract import Cause, Written
from serve_app.policy.order import Scheduler
from serve_app.policy.retries import after_loss
from serve_app.policy.rules import DEFAULT_RULES
from serve_app.policy.running import Running
from tests.tables import each
from tests.unit.virtual_order import Entry, seeds

SLICE = 512
RULES = DEFAULT_RULES._replace(slice_tokens=SLICE)
KIND = "chat/completions s1"
MS_PER_TOKEN = 10
H100 = "estimate-h100-llama-8b"


def scheduler(*running: Entry, capacity: int = 1, slice_tokens: int = SLICE) -> Scheduler[Entry]:
    """All of these run since 0, at a known pace."""
    its = Scheduler[Entry](RULES._replace(slice_tokens=slice_tokens))
    its.capacity = capacity
    for _ in range(20):
        its.estimates.pace.learn(0, 100, 100 * MS_PER_TOKEN)
    for entry in running:
        its.add(entry)
    while its.next(0) is not None:
        pass
    return its


def request(request_class: str = "standard", at_ms: int = 0, **more: object) -> Entry:
    return Entry(request_class, at_ms, kind=KIND, **more)  # type: ignore[arg-type]


def yields(its: Scheduler[Entry], tokens: float) -> list[Running[Entry]]:
    """Who yields after so many tokens."""
    return its.to_yield(int(tokens * MS_PER_TOKEN))


@each(
    "runs, waits, after",
    [
        ("batch", "realtime", SLICE / 16),
        ("batch", "standard", SLICE / 16),
        ("batch", "batch", SLICE),
        ("standard", "standard", SLICE),
        ("standard", "realtime", SLICE),
        ("realtime", "critical", SLICE),
        ("realtime", "batch", None),
        ("standard", "batch", None),
        ("realtime", "standard", None),
    ],
)
def test_who_is_as_urgent_interrupts_what_has_had_its_slice_and_batch_sooner(
    runs: str, waits: str, after: float | None
) -> None:
    its = scheduler(long := request(runs))
    its.add(request(waits, max_output_tokens=SLICE))
    if after is None:
        assert yields(its, 100 * SLICE) == []
        return
    assert yields(its, after - 10) == []
    (found,) = yields(its, after + 20)
    assert found.entry is long
    assert yields(its, after + 20) == [], "one place is enough for one request"


def test_nobody_is_interrupted_for_a_longer_request_or_without_need() -> None:
    its = scheduler(request(max_output_tokens=SLICE + 50))
    assert yields(its, SLICE + 10) == [], "nobody waits"
    its.add(request())
    assert yields(its, SLICE + 10) == [], "40 tokens are left"
    off = scheduler(request("batch"), slice_tokens=0)
    off.add(request("realtime"))
    assert yields(off, 10 * SLICE) == []
    free = scheduler(request("batch"), capacity=2)
    free.add(request("realtime"))
    assert yields(free, 10 * SLICE) == []


@pytest.mark.parametrize(
    "fixed",
    [
        Entry("batch", kind="embeddings w0"),
        Entry("batch"),
        Entry("batch", kind=KIND, deadline_ms=(SLICE + 400) * MS_PER_TOKEN),
    ],
)
def test_what_writes_no_tokens_or_would_miss_its_deadline_goes_on(fixed: Entry) -> None:
    its = scheduler(fixed)
    its.add(request("realtime"))
    assert yields(its, SLICE) == []


def test_what_was_taken_over_or_can_never_be_continued_goes_on() -> None:
    its = scheduler()
    its.adopt([request("batch")])
    its.add(request("realtime"))
    assert yields(its, 10 * SLICE) == []
    its = scheduler(request("batch"))
    its.add(request("realtime"))
    (found,) = yields(its, SLICE)
    its.stays(found, SLICE * MS_PER_TOKEN, always=True)
    assert yields(its, 100 * SLICE) == []


def test_a_resumed_request_is_sure_of_its_slice_and_its_tenant_pays_what_it_wrote() -> None:
    its = scheduler(request("batch", tenant="b"))
    its.add(short := request("realtime", max_output_tokens=5))
    (long,) = yields(its, 100)
    starts = its.suspended(long, Written(100, whole=False), 1_000)
    assert starts is not None
    assert starts.entry is short
    paid = its.lines["batch"].counters
    assert paid["b"] == DEFAULT_RULES.tenants.cost(10, 100)
    its.ended(starts, Written(5), 1_050)
    assert its.next(1_050) is long
    its.add(request("realtime"))
    assert its.to_yield(1_050 + (SLICE // 16 - 5) * MS_PER_TOKEN) == []
    later_ms = 1_050 + (SLICE // 16 + 20) * MS_PER_TOKEN
    assert its.to_yield(later_ms) == [long]
    its.ended(long, Written(140), later_ms)
    assert paid["b"] == DEFAULT_RULES.tenants.cost(10, 140)
    assert its._running_cost == pytest.approx(0.0)


def test_a_slice_that_is_over_sends_a_request_behind_those_that_wait() -> None:
    its = scheduler(request())
    short = [request(at_ms=number, max_output_tokens=9) for number in range(3)]
    for one in short:
        its.add(one)
    now_ms = (SLICE + 10) * MS_PER_TOKEN
    (long,) = its.to_yield(now_ms)
    running = its.suspended(long, Written(SLICE + 10, whole=False), now_ms)
    order = []
    while running is not None:
        order.append(running.entry)
        its.ended(running, Written(9), now_ms)
        running = its.next(now_ms)
    assert order == [*short, long.entry]


def test_a_yield_counts_against_no_request() -> None:
    opened = ["", *[Cause.YIELDED] * 100]
    following = after_loss(opened, 101, Cause.YIELDED, None, 3)
    assert following is not None
    assert (following.epoch, following.quarantined) == (102, False)


def run(name: str, seed: int, policy: str, engine: str = "tiny-cpu") -> Outcome:
    chosen = PRESETS[name]
    plan = chosen.make(cluster_of(chosen, engine, 1, 0, 1), seed)
    return simulate(plan.cluster, plan.sources, policy, plan.until_s)


def ttft_p99_s(outcome: Outcome, of: str) -> float:
    return percentile(
        [
            one.ttft_s
            for one in outcome.records
            if one.first_token_s is not None and of in (one.work.request_class, one.work.tenant)
        ],
        99,
    )


def tokens(outcome: Outcome, of: str) -> int:
    return sum(
        one.tokens for one in outcome.records if of in (one.work.request_class, one.work.tenant)
    )


def step_s(outcome: Outcome) -> float:
    """The mean time of a step."""
    gaps = [gap for engine in outcome.engines for gap in engine.gaps]
    return sum(gap_s * count for gap_s, count in gaps) / sum(count for _, count in gaps)


@pytest.mark.nightly  # test_classes.py: a flood of batch does not delay realtime
@pytest.mark.parametrize("seed", [1, 2])
def test_a_flood_of_batch_hardly_delays_realtime_and_is_hardly_slower(seed: int) -> None:
    alone, flood = run("no-flood", seed, "slices", H100), run("flood", seed, "slices", H100)
    whole = run("flood", seed, "hermes", H100)
    p99_s = [ttft_p99_s(one, "realtime") for one in (alone, flood, whole)]
    part = tokens(flood, "batch") / tokens(whole, "batch")
    print(f"TTFT p99 alone {p99_s[0]:.3f}, slices {p99_s[1]:.3f}, none {p99_s[2]:.3f} s", end="; ")
    print(f"step {step_s(flood):.4f} s, tokens of batch × {part:.3f}")
    assert p99_s[1] <= p99_s[0] + 3 * step_s(flood)
    assert part >= 0.95
    assert slot_times(flood)[1] < 0.001 * flood.end_s * flood.cluster.slots


def answered(outcome: Outcome, tenant: str) -> float:
    """The part of a tenant's requests that has been answered."""
    its = [one for one in outcome.records if one.work.tenant == tenant]
    return sum(one.answered for one in its) / len(its)


@pytest.mark.parametrize("seed", seeds(1, 2))
def test_short_requests_wait_much_less_behind_long_ones(seed: int) -> None:
    slices, whole = (run("long-generations", seed, policy, H100) for policy in ("slices", "hermes"))
    p99_s = [ttft_p99_s(one, "short") for one in (slices, whole)]
    print(f"TTFT p99 of the short ones {p99_s[0]:.3f} s, without slices {p99_s[1]:.3f} s")
    assert p99_s[0] <= 0.1 * p99_s[1]
    assert answered(slices, "short") == answered(slices, "long") == 1.0


@pytest.mark.parametrize("seed", seeds(1, 2))
def test_endless_answers_do_not_stop_short_ones(seed: int) -> None:
    """Nor the other way round: what the long ones lose is what the short ones need, and a little
    for continuing.
    """
    name = "endless-generations"
    slices, whole = (run(name, seed, policy, H100) for policy in ("slices", "hermes"))
    parts = [answered(one, "short") for one in (slices, whole)]
    long = tokens(slices, "long") / tokens(whole, "long")
    print(f"answered {parts[0]:.1%}, without slices {parts[1]:.1%}", end="; ")
    print(f"TTFT p99 {ttft_p99_s(slices, 'short'):.3f} s; tokens of the long ones × {long:.3f}")
    assert parts[0] >= 0.9
    assert parts[1] <= 0.1
    assert long >= 0.65


@pytest.mark.nightly  # test_classes.py and test_tenants.py: the shares where nobody yields
@pytest.mark.parametrize("seed", [1, 2])
def test_shares_hold_where_requests_yield(seed: int) -> None:
    both = run("interactive-and-batch", seed, "slices")
    share = tokens(both, "realtime") / tokens(both, "batch")
    tenants = run("two-tenants", seed, "slices")
    part = tokens(tenants, "short") / sum(tenants.served.values())
    print(f"realtime {share / (1 + share):.1%}; the tenant with short requests {part:.1%}")
    assert 0.65 <= share / (1 + share) <= 0.75
    assert 0.45 <= part <= 0.55
