"""The estimated wait, promises and the breaker; and what comes of them in virtual time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from scripts.benchmark.report import percentile
from scripts.simulation.engine_model import load_engine
from scripts.simulation.presets import overloaded
from scripts.simulation.service import Cluster, simulate
from scripts.simulation.work import Record
from serve_app.contract import IngressLease, Reason
from serve_app.errors import RequestRefused
from serve_app.policy.overload import (
    DEFAULT_OVERLOAD,
    MOST_TOLD,
    Asked,
    Expected,
    Flow,
    Load,
    Overload,
    OverloadRules,
    Promises,
    Reading,
)
from tests.tables import each

SLOTS, STARTS = 10, 40
COST = 100.0
"""Of each request. Ten seconds in which `STARTS` have started: 400 cost/s drain."""
DIGEST = "0123abcd"


def reading(*others: Load, waiting: Any = ("standard",), **more: Any) -> Reading:
    return Reading(SLOTS, SLOTS // (len(others) + 1), frozenset(waiting), others, **more)


def measured(starts: int = STARTS, tenant: str = "t", **options: Any) -> Overload:
    """An ingress of which so many requests have started in ten seconds, while others waited."""
    its = Overload(**options)
    its.told(reading(), 0)
    for _ in range(starts):
        its.started("standard", tenant, COST)
    its.told(reading(), 10_000)
    return its


def asked(within_s: float = 1e6, now_ms: int = 10_000, **fields: Any) -> Asked:
    return Asked("standard", "t", now_ms, now_ms + int(1000 * within_s), digest=DIGEST)._replace(
        **fields
    )


def refused(its: Overload, request: Asked, cost: float = COST) -> RequestRefused | None:
    try:
        its.check(request, Expected(cost, 0.0))
    except RequestRefused as refusal:
        return refusal
    its.promises.kept(request)
    return None


def after_s(its: Overload, request: Asked) -> float:
    """The `Retry-After` of a request that is refused."""
    refusal = refused(its, request)
    assert refusal is not None
    assert refusal.jitter == 0, "each is told its own time"
    assert refusal.retry_after_s is not None
    return refusal.retry_after_s


def waits(
    its: Overload, requests: float, tenant: str = "t", request_class: str = "standard"
) -> None:
    """So many more wait; if negative, fewer."""
    its.enters(request_class, tenant, requests * COST)


def test_the_wait_is_what_waits_over_what_drains_and_few_starts_say_nothing() -> None:
    assert measured().wait_s("standard") == 0
    for starts, wait_s in ((15, None), (16, 100 / 1.6), (40, 25.0)):
        its = measured(starts)
        waits(its, 100)
        assert its.wait_s("standard") == pytest.approx(wait_s)
        assert its.wait_s("batch") is None, "nothing of that has ever waited"


def test_what_starts_while_nothing_waits_is_no_measure() -> None:
    its = Overload()
    its.told(reading(waiting=()), 0)
    for second in range(1, 10):
        for _ in range(STARTS):
            its.started("standard", "t", COST)
        its.told(reading(waiting=("standard",) if second == 5 else ()), second * 1000)
    assert its.drain_per_s("standard") is None


def test_more_engines_drain_more_at_once() -> None:
    its = measured()
    waits(its, 100)
    its.told(reading()._replace(slots=2 * SLOTS), 10_000)
    assert its.wait_s("standard") == pytest.approx(12.5)


def test_ingresses_add_up_what_waits_and_share_what_they_have_measured() -> None:
    its, fresh = measured(), Overload()
    waits(its, 60)
    waits(fresh, 40)
    lease = IngressLease("i", load=its.load(10_000).encode())
    fresh.told(reading(Load.decode(IngressLease.decode(lease.encode().encode()).load)), 10_000)
    assert fresh.wait_s("standard") == pytest.approx(25.0)
    its.told(reading(fresh.load(10_000)), 10_000)
    assert its.wait_s("standard") == pytest.approx(25.0)


def test_what_a_dead_ingress_has_accepted_counts_by_its_number() -> None:
    its = measured()
    waits(its, 1)
    its.told(reading(unclaimed={"standard": 100}), 10_000)
    assert its.wait_s("standard") == pytest.approx(25.0)


@each("text", ["", "x", "1,2,3,4/", "1,2,3;" * 4, "nan,1,1,1;1,1,1,1;1,1,1,1;1,1,1,1/", "/zz"])
def test_the_load_of_another_version_says_nothing(text: str) -> None:
    assert Load.decode(text) == Load()
    assert IngressLease.decode(b"i|c|1|0|0||0|0|m|1|more|load=x/y").load == "x/y"


def test_a_load_tells_no_more_promises_than_it_may() -> None:
    its = measured()
    for number in range(2 * MOST_TOLD):
        its.promises.make(asked(digest=f"{number:08x}"), 1.0, 1.0, 0.001)
    text = its.load(10_000).encode()
    assert len(text) < 6_000
    load = Load.decode(text)
    assert len(load.promises) == MOST_TOLD
    assert load.flows == (Flow(), Flow(), Flow(40.0, 4000.0, 100.0), Flow())
    assert its.load(10_000 + DEFAULT_OVERLOAD.told_ms + 1).promises == ()
    flood = ",".join(f"{number:08x}{10_000:x}" for number in range(9_999))
    assert len(Load.decode(f"{text.partition('/')[0]}/{flood}").promises) == MOST_TOLD


def test_only_what_would_wait_beyond_its_deadline_is_refused() -> None:
    its = measured()
    waits(its, 100)
    refusal = refused(its, asked(within_s=20))
    assert refusal is not None
    assert refusal.reason is Reason.OVERLOADED
    assert "Prefer: respond-async" in refusal.message
    assert refused(its, asked(within_s=40)) is not None, "it has to wait behind the promised one"
    for fits in ({"within_s": 60}, {"within_s": 20, "request_class": "realtime"}):
        assert refused(its, asked(**fits)) is None, fits
    assert refused(measured(15), asked(within_s=0.1)) is None


def test_a_tenant_waits_for_its_own_share_only() -> None:
    """Of what drains it gets its share by weight, or what it got lately if that is more."""
    its = measured(tenant="heavy", weights={"heavy": 3.0})
    waits(its, 100, "heavy")
    its.told(reading(), 10_000)
    assert its.wait_s("standard", "heavy") == pytest.approx(25.0)
    assert its.wait_s("standard", "light", COST) == pytest.approx(0.25 * 4)
    waits(its, 25, "light")
    its.told(reading(), 10_000)
    assert its.wait_s("standard", "light") == pytest.approx(6.25 * 4)
    assert its.wait_s("standard", "heavy") == pytest.approx(25.0), "lately it got everything"


def test_a_herd_that_is_refused_together_does_not_come_back_together() -> None:
    """Each is told its own time, at which it is accepted and what is new is not."""
    its = measured()
    waits(its, 100)
    herd = [asked(within_s=25, digest=f"{number:08x}") for number in range(50)]
    told_s = [after_s(its, one) for one in herd]
    gaps_s = [after - before for before, after in pairwise(told_s)]
    assert gaps_s == pytest.approx([COST / 400] * 49, abs=0.002)
    waiting, last_s = 100.0, 0.0
    for number, (request, at_s) in enumerate(zip(herd, told_s, strict=True), start=1_000):
        drained, now_ms = 4 * (at_s - last_s), 10_000 + int(1000 * at_s)
        waits(its, -drained)
        waiting, last_s = waiting - drained, at_s
        new = asked(within_s=25, now_ms=now_ms, digest=f"{number:08x}")
        assert refused(its, new) is not None
        again = request._replace(accepted_ms=now_ms, deadline_ms=now_ms + 25_000)
        assert refused(its, again) is None
        waits(its, 1)
        waiting += 1
        assert waiting < 100
    assert len(its.promises) == 50, "those of the new ones"


def test_a_retry_that_comes_too_early_is_no_promised_one() -> None:
    its = measured()
    waits(its, 100)
    assert after_s(its, asked(within_s=20)) == pytest.approx(10.0, abs=0.5)
    early_ms = 10_000 + 9_000
    waits(its, -36)  # as much has drained
    again = refused(its, asked(within_s=16, now_ms=early_ms))
    assert again is not None
    at_ms = 10_000 + 10_500
    waits(its, -4)
    assert refused(its, asked(within_s=20, now_ms=at_ms)) is None


def test_a_promise_holds_at_every_ingress() -> None:
    one, two = measured(), Overload()
    waits(one, 100)
    assert after_s(one, asked(within_s=20)) == pytest.approx(10.0, abs=0.5)
    two.told(reading(Load.decode(one.load(10_100).encode()), waiting=()), 10_100)
    waits(one, -35)
    two.told(reading(Load.decode(one.load(20_000).encode()), waiting=()), 20_000)
    others = asked(within_s=19, now_ms=20_500, digest="ffffffff")
    its = asked(within_s=19, now_ms=20_500)
    assert refused(two, others) is not None
    assert refused(two, its) is None
    assert refused(two, its) is not None, "it is kept once"


def test_promises_are_bounded_in_number_and_time() -> None:
    its = measured().promises
    for number in range(DEFAULT_OVERLOAD.most_promises + 10):
        its.make(asked(digest=f"{number:08x}"), 1.0, 1.0, 0.0)
    assert len(its) == DEFAULT_OVERLOAD.most_promises
    its.heard([("ffffffff", 1)])
    assert len(its) == DEFAULT_OVERLOAD.most_promises
    its.sweep(11_000 + DEFAULT_OVERLOAD.late_ms + 1)
    assert len(its) == 0
    far_s = DEFAULT_OVERLOAD.most_ahead_s + 1
    assert its.make(asked(), 1.0, far_s, 1.0) == 10_000 + 1000 * far_s
    assert len(its) == 0
    assert not its.outstanding(asked()), "nobody is kept behind what is no promise"


def test_only_promises_of_ours_that_stand_and_are_due_about_now_are_coming() -> None:
    its = Promises(DEFAULT_OVERLOAD)
    for number in range(6):
        one = asked(now_ms=0, digest=f"{number % 5:08x}")  # the last one is equal to the first
        assert its.make(one, COST, over_s=1.0, takes_s=2.0) == 2_000 * (number + 1)
    its.heard([("feedbeef", 5_000)])

    def coming() -> list[int]:
        return [its.coming("standard", at_ms) for at_ms in range(1_000, 14_000, 2_000)]

    assert coming() == [1, 2, 2, 2, 2, 2, 1]
    assert its.coming("batch", 4_000) == 0
    its.kept(asked(now_ms=4_000, digest=f"{1:08x}"))
    assert coming() == [1, 1, 1, 2, 2, 2, 1]
    its.sweep(DEFAULT_OVERLOAD.late_ms + 8_000)
    assert coming() == [0, 0, 0, 1, 2, 2, 1]


def test_where_promised_ones_stay_away_new_ones_fill_the_queue() -> None:
    its = measured()
    waits(its, 100)
    assert refused(its, asked(within_s=25)) is not None
    for digest in range(200):
        refused(its, asked(within_s=25, digest=f"{digest:08x}"))
    waits(its, -45)
    new = asked(within_s=25, now_ms=21_250, digest="ffffffff")
    assert refused(its, new) is not None
    waits(its, -10)
    assert refused(its, new) is None


def test_the_breaker_opens_above_a_backlog_and_closes_below_half_of_it() -> None:
    its = measured(rules=OverloadRules(async_above_s=20.0))
    states = []
    for requests in (79, 2, -40, -2, 20, 60):
        waits(its, requests)
        its.told(reading(), 10_000)
        states.append("standard" in its.open)
    assert states == [False, True, True, False, False, True]


def test_an_open_breaker_refuses_all_but_background_work_of_its_class() -> None:
    its = measured(rules=OverloadRules(async_above_s=20.0))
    waits(its, 100)
    its.told(reading(), 10_000)
    assert after_s(its, asked()) == pytest.approx(15.0, abs=0.5)
    refusal = refused(its, asked(digest="ffffffff"))
    assert refusal is not None
    assert (refusal.reason, refusal.status) == (Reason.OVERLOADED, 503)
    assert refusal.status_at("/v1/messages") == 529
    assert refused(its, asked(detached=True)) is None
    assert refused(its, asked(request_class="realtime")) is None
    waits(its, -60)
    again = asked(now_ms=25_000)
    assert refused(its, again) is None, "as it was told, although the breaker is open"
    assert "standard" in its.open


def test_engines_that_stand_still_open_it_and_the_errors_of_clients_do_not() -> None:
    """Nothing of a request counts before it is accepted."""
    its = measured(rules=OverloadRules(async_above_s=20.0))
    waits(its, 60)
    for number in range(1_000):
        refused(its, asked(within_s=-1, digest=f"{number:08x}"))
    its.told(reading(), 10_000)
    assert its.open == set()
    its.told(reading(), 20_000)
    assert its.open == {"standard"}, "in these ten seconds nothing has started"


# -- in virtual time ------------------------------------------------------------------------------

CLUSTER = Cluster(load_engine("tiny-cpu"), 1, 16, ingresses=2)
FULL_PER_S = 9.85
"""Chats that this engine ends in a second, see `capacity_per_s`."""
SECONDS = 40.0


@cache
def chats(*loads: tuple[str, float], first_weight: float = 1.0) -> tuple[Record, ...]:
    """What became of each request that came after 30 s of 100 % load."""
    cluster = replace(CLUSTER, weights={loads[0][0]: first_weight})
    plan = overloaded(cluster, 1, dict(loads), FULL_PER_S, SECONDS)
    outcome = simulate(plan.cluster, plan.sources)
    return tuple(one for one in outcome.records if one.arrived_s >= 30.0)


def answered(records: tuple[Record, ...]) -> int:
    """How many of them were answered in that time."""
    return sum(one.answered and (one.ended_s or 0) <= 30.0 + SECONDS for one in records)


def test_five_times_what_engines_can_do_costs_no_goodput() -> None:
    full, over = chats(("t", 1.0)), chats(("t", 5.0))
    assert answered(over) >= 0.95 * answered(full)
    accepted = [one for one in over if not one.refused]
    assert sum(one.expired for one in accepted) < 0.01 * len(accepted)


def test_whoever_obeys_retry_after_is_accepted_and_waited_hardly_longer_than_needed() -> None:
    """The shortest waits are those of clients who are let in, as many as are, in their order."""
    records = sorted(chats(("t", 3.0)), key=lambda one: one.arrived_s)
    retries = {id(one.retry_of): one for one in records if one.retry_of is not None}
    clients = [one for one in records if one.retry_of is None]
    refused_first = [one for one in clients if one.refused]
    assert len(refused_first) > 300
    again = [retries[id(one)] for one in refused_first]
    assert sum(not one.refused for one in again) >= 0.95 * len(again)
    let_in_s = sorted(one.arrived_s for one in records if not one.refused)
    told_s = sum(one.retry_after_s or 0.0 for one in refused_first)
    best_s = sum(
        max(0.0, at_s - one.arrived_s)
        for one, at_s in zip(clients, let_in_s, strict=False)
        if one.refused
    )
    assert told_s <= 1.5 * best_s


@pytest.mark.parametrize(
    ("weight", "share"), [(4.0, 0.8), pytest.param(1.0, 0.5, marks=pytest.mark.nightly)]
)
def test_two_tenants_that_want_too_much_get_their_shares(weight: float, share: float) -> None:
    records = chats(("a", 2.5), ("b", 2.5), first_weight=weight)
    late = [one for one in records if one.answered and 40.0 <= (one.ended_s or 0) <= 70.0]
    got = sum(one.tokens for one in late if one.work.tenant == "a") / sum(
        one.tokens for one in late
    )
    assert abs(got - share) <= 0.05


@pytest.mark.nightly
def test_a_light_tenant_waits_little_beside_one_with_ten_times_its_share() -> None:
    """Beside ten tenants like itself it would wait as long."""

    def p99_s(*others: tuple[str, float]) -> float:
        records = chats(("light", 0.09), *others)
        return percentile([one.whole_s for one in records if one.work.tenant == "light"], 99)

    alike = p99_s(*((f"other-{number}", 0.5) for number in range(10)))
    assert p99_s(("heavy", 5.0)) <= 1.2 * alike
