"""Which claimed request starts, and what happens to one that must wait for another to end: real
ingresses on a real Redis, and an engine that runs one request at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from serve_app import timings
from serve_app.cluster.entrance import Entrance
from serve_app.cluster.leases import Membership
from serve_app.contract import IngressLease, Reason
from serve_app.dispatch.attempts import Quarantine, StallReason
from serve_app.errors import REASONS
from serve_app.policy.classes import CLASSES
from serve_app.processes import IngressProcess
from serve_app.redis.keyspace import wake_channel
from tests.journal.ingresses import REPLICA, WritingWorker, ended, ingress_of, serving
from tests.journal.journal_helpers import World
from tests.waiting import eventually

SOONER_S = 600.0


@asynccontextmanager
async def held_back(w: World) -> AsyncIterator[tuple[WritingWorker, IngressProcess]]:
    """An ingress that runs `r`, and has claimed `s` and `b`, which wait for its end."""
    async with serving(w, capacity=1) as (worker, ingress):
        worker.busy = {"first": asyncio.Event(), "r": asyncio.Event()}
        await w.admit("first")
        await eventually(lambda: worker.calls)
        await w.admit("b", request_class="batch", timeout_s=SOONER_S)
        await w.admit("s", request_class="standard", timeout_s=SOONER_S)
        await w.admit("r", request_class="realtime", timeout_s=2 * SOONER_S)
        worker.busy["first"].set()
        await eventually(lambda: ("r", 1) in worker.calls)
        assert ingress.dispatcher.in_flight == 3
        yield worker, ingress


async def states(w: World, *request_ids: str) -> list[str]:
    """The states in which the requests have ended, without those that have not."""
    found = [(await w.ending(request_id))[0] for request_id in request_ids]
    return [state for state in found if state]


@pytest.mark.parametrize("reason", [Reason.CANCELLED, Reason.DEADLINE])
@pytest.mark.parametrize("wake", ["elsewhere", "ingress-1"])
async def test_what_ends_between_its_claim_and_its_start_takes_no_slot_and_no_call(
    w: World, reason: Reason, wake: str
) -> None:
    channel = wake_channel(w.settings.namespace, wake)
    async with serving(w, capacity=1) as (worker, ingress):
        worker.busy = {"first": asyncio.Event(), "second": asyncio.Event()}
        await w.admit("first")
        await eventually(lambda: worker.calls)
        for name in ("second", "unwanted", "batch", "last"):
            kind = "batch" if name == "batch" else "standard"
            await w.admit(name, request_class=kind, wake=channel, timeout_s=SOONER_S)
        worker.busy["first"].set()
        await eventually(lambda: "second" in worker.order)
        assert ingress.dispatcher.in_flight == 3, "`last` is not claimed yet"
        for name in ("unwanted", "batch"):
            assert await w.endings.end(name, reason)
        await eventually(lambda: ingress.dispatcher.in_flight == 1)
        assert await w.endings.end("second", reason), "one that runs goes on until it sees"
        worker.busy["second"].set()
        await eventually(lambda: ended(w, "last"))
        assert worker.order == ["first", "second", "last"]
        assert await states(w, "unwanted", "batch", "second") == [REASONS[reason].state] * 3


async def test_urgent_classes_go_first_and_batch_gets_its_share(w: World) -> None:
    async with serving(w, capacity=1) as (worker, _):
        worker.busy = {"first": asyncio.Event()}
        await w.admit("first", request_class="batch")
        await eventually(lambda: worker.calls)
        for number in range(2):
            for name in reversed(CLASSES):
                await w.admit(f"{name}_{number}", request_class=name)
        depths = await w.depths()
        assert [depth.waiting for depth in depths.values()] == [2, 2, 2, 2]
        worker.busy["first"].set()
        await eventually(lambda: ended(w, "batch_1"))
        order = worker.order
        interactive = [name for name in order if not name.startswith("batch")]
        urgent_first = [f"{name}_{n}" for name in CLASSES[:3] for n in range(2)]
        assert interactive == ["first", *urgent_first]
        batch = [name for name in order if name.startswith("batch")]
        assert batch == ["batch_0", "batch_1"]
        assert order[:3] == ["first", "critical_0", "critical_1"]
        assert order.index("batch_0") < order.index("standard_0"), "30 % of the work"


async def test_a_more_urgent_request_that_comes_later_overtakes_what_is_held_back(w: World) -> None:
    async with held_back(w) as (worker, _):
        await w.admit("later", request_class="realtime")
        worker.busy["r"].set()
        await eventually(lambda: ended(w, "b"))
        assert worker.order == ["first", "r", "b", "later", "s"]


async def test_a_request_in_quarantine_holds_no_slot_that_another_could_have(
    w: World, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "REPLICA_AVOID_S", 0.0)
    async with serving(w, capacity=1) as (worker, ingress):
        worker.deadly = {"suspect"}
        worker.busy = {"next": asyncio.Event()}
        async with Quarantine(w.link, namespace).alone():
            await w.admit("suspect")
            await eventually(lambda: ingress.dispatcher._attempts.stalls.keys(StallReason.TURN))
            assert ingress.dispatcher.lease(complete=True).running == 0, "others may have its room"
            await w.admit("next")
            await eventually(lambda: ("next", 1) in worker.calls)
        await eventually(lambda: states(w, "suspect"))
        assert await w.ending("suspect") == ("failed", "poison")
        worker.busy["next"].set()
        await eventually(lambda: ended(w, "next"))


async def test_a_request_that_is_held_back_keeps_its_deadline(
    w: World, later: Callable[[float], None]
) -> None:
    async with held_back(w) as (worker, ingress):
        later(SOONER_S + 1)
        await eventually(lambda: ingress.dispatcher.in_flight == 1)
        assert await states(w, "s", "b") == ["expired", "expired"]
        assert worker.order == ["first", "r"], "no engine is asked"
        worker.busy["r"].set()
        await eventually(lambda: ended(w, "r"))


async def test_requests_held_back_run_where_they_are_when_a_newer_ray_cluster_takes_over(
    w: World, namespace: str
) -> None:
    async with held_back(w) as (worker, ingress):
        younger = Membership(w.link, namespace)
        lease = IngressLease("ingress-2", "session-2", complete=True, model=w.settings.model.name)
        entrance = Entrance(namespace, "", lease.cluster, lease.model)
        await younger.join_as_ingress(lambda: lease, entrance)
        await eventually(lambda: not ingress.dispatcher._scheduler.claiming)
        await w.admit("next")
        worker.busy["r"].set()
        await eventually(lambda: ingress.dispatcher.in_flight == 0)
        assert await states(w, "s", "b") == ["completed", "completed"]
        assert (await w.depths())["standard"].waiting == 1, "the younger one's"
        assert worker.order == ["first", "r", "b", "s"]
        await younger.leave()


@pytest.mark.parametrize("answered", [False, True])
async def test_requests_taken_over_while_held_back_run_once(
    w: World, namespace: str, answered: bool
) -> None:
    """An ingress that was paused starts what another ingress runs already, or has answered."""
    async with held_back(w) as (worker, paused):
        if not answered:
            worker.busy |= {"s": asyncio.Event(), "b": asyncio.Event()}
        await paused.membership.leave()  # as if it could not renew its lease
        spare = Membership(w.link, namespace)
        await spare.join_as_worker("replica-2", lambda _: 8)
        seen = (REPLICA, "replica-2")
        async with ingress_of(w, "ingress-2", worker, seen) as other:
            await eventually(lambda: {("s", 1), ("b", 1)} <= {*worker.calls})
            if answered:
                await eventually(lambda: other.dispatcher.in_flight == 1)
            worker.busy["r"].set()
            await eventually(lambda: paused.dispatcher.in_flight == 0)
            assert len(worker.calls) == 6, "both ingresses have started both"
            for name in () if answered else ("s", "b"):
                worker.busy[name].set()
            await eventually(lambda: other.dispatcher.in_flight == 0)
        await spare.leave()
        assert await states(w, "r", "s", "b") == ["completed"] * 3
        assert await ended(w, "r"), "no queue has an entry"


async def test_a_request_held_back_does_not_count_as_a_lost_claim(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with held_back(w) as (worker, ingress):
        with monkeypatch.context() as at_once:
            at_once.setattr(timings, "CLAIM_ANSWER_LOST_MS", 0)
            mine = w.queue("ingress-1")
            assert await mine.take_over(None, ingress.dispatcher._claimed()) == []
        assert len(ingress.dispatcher._claimed()) == 3
        worker.busy["r"].set()
        await eventually(lambda: ended(w, "b"))
        assert worker.order == ["first", "r", "b", "s"]


async def test_an_engines_spare_slots_stay_free_whatever_one_request_brings(w: World) -> None:
    """Of 128 slots 112 are for all."""
    async with serving(w, capacity=128) as (worker, ingress):
        worker.busy = {name: asyncio.Event() for name in ("one", "many", "later", "urgent")}
        await w.admit("one", sequences=16)
        await w.admit("many", sequences=112)
        await eventually(lambda: len(worker.calls) == 2)
        await w.admit("later", request_class="batch")
        await w.admit("urgent", request_class="realtime")
        await eventually(lambda: ("urgent", 1) in worker.calls)
        assert ingress.dispatcher.lease(complete=True).running == 129
        assert len(worker.calls) == 3, "a batch takes none of them"
        for event in worker.busy.values():
            event.set()
        await eventually(lambda: ended(w, "later"))
