"""Two Ray clusters in one namespace, on a real Redis: an upgrade, another model, a model that has
been renamed, another service.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from serve_app import timings
from serve_app.cluster.entrance import Entrance
from serve_app.cluster.leases import Membership
from serve_app.cluster.members import Members
from serve_app.contract import IngressLease
from serve_app.dispatch.unserved import Unserved
from serve_app.foundation import Foundation
from serve_app.processes import IngressProcess
from serve_app.redis.keyspace import (
    cluster_key,
    ingresses_key,
    models_key,
    open_batches_key,
    service_key,
)
from tests.journal.in_process import door_of, ingress_process
from tests.journal.ingresses import WritingWorker, ended
from tests.journal.journal_helpers import OPENED, World, world
from tests.waiting import eventually

OLD, YOUNG = "session_2026-10-25_02-59-00", "session_2026-10-25_02-01-00"
"""Clocks are put back in between, so that the younger one's name comes first."""
MODEL, RENAMED = "hermes-tiny", "hermes-tiny-2"
LATE = f"req_{'0' * 32}"
GONE = ("failed", "model_not_found")
ONE_OF_EACH = {"workers": {"replicas": 1}, "ingress": {"replicas": 1}}


@asynccontextmanager
async def a_world(w: World, namespace: str, model: str, service: str = "") -> AsyncIterator[World]:
    """The namespace as a service with other settings sees it."""
    more: dict[str, Any] = {"model": {"name": model}, "service": service, **ONE_OF_EACH}
    async with world(w.settings.redis.url, namespace, **more) as made:
        yield made


@asynccontextmanager
async def cluster(w: World, session: str) -> AsyncIterator[tuple[WritingWorker, IngressProcess]]:
    """A Ray cluster with a worker and an ingress, both named after its session."""
    worker = WritingWorker(await w.writer())
    membership = Membership(w.link, w.settings.namespace)
    name = f"worker of {session}"
    await membership.join_as_worker(name, lambda _: 8)
    own = f"ingress of {session}"
    try:
        async with ingress_process(w.settings, worker.execute, [name], own, session) as ingress:
            yield worker, ingress
    finally:
        await membership.leave()


def warnings(ingress: IngressProcess) -> str:
    told = ingress.readiness.report()[1]["warnings"]
    assert isinstance(told, list)
    return " ".join(one for one in told if "Ray cluster" in one or "namespace" in one)


async def test_the_cluster_that_came_later_answers_whatever_its_heads_clock_says(
    w: World, namespace: str
) -> None:
    async with a_world(w, namespace, MODEL) as of, cluster(of, OLD) as (idles, old):
        await of.admit("first")
        await eventually(lambda: ended(of, "first"))
        assert warnings(old) == ""
        async with cluster(of, YOUNG) as (works, young):
            await eventually(lambda: not old.dispatcher._scheduler.claiming)
            await eventually(lambda: not old.dispatcher._claim_waits)
            await of.admit("second")
            await eventually(lambda: ended(of, "second"))
            assert (idles.order, works.order) == (["first"], ["second"])
            await eventually(lambda: f"{YOUNG} answers new requests" in warnings(old))
            await eventually(lambda: "this one answers new requests" in warnings(young))
            assert old.readiness.report()[0]
            assert young.readiness.report()[0]
        await eventually(lambda: old.dispatcher._scheduler.claiming)
        assert warnings(old) == ""


async def test_two_models_in_a_namespace_are_each_answered_by_their_own_cluster(
    w: World, namespace: str
) -> None:
    async with (
        a_world(w, namespace, MODEL) as of,
        a_world(w, namespace, RENAMED) as other,
        cluster(of, OLD) as (one, old),
        cluster(other, YOUNG) as (two, young),
    ):
        await eventually(lambda: f"another model, '{RENAMED}'" in warnings(old))
        await eventually(lambda: f"another model, '{MODEL}'" in warnings(young))
        await eventually(lambda: all(each.complete for each in old.membership.members.ingresses))
        assert old._ingresses() == (1, 2), "the queues' limits are its own; Redis's memory is not"
        for name, worker, its in ("old", one, of), ("new", two, other):
            requests = [f"{name}-{n}" for n in range(8)]
            worker.busy |= {request: asyncio.Event() for request in requests}
            for request in requests:
                await its.admit(request, request_class="realtime")  # these may take all slots
        await eventually(lambda: (len(one.calls), len(two.calls)) == (8, 8))
        for held in (*one.busy.values(), *two.busy.values()):
            held.set()
        await eventually(lambda: ended(of, "old-7"))
        await eventually(lambda: ended(other, "new-7"))
        assert {*one.order} & {*two.order} == set()


async def test_a_ray_cluster_is_as_old_as_redis_says(w: World, namespace: str) -> None:
    """Neither its ingresses' ends nor a Redis that forgets make it younger."""
    entrance = Entrance(namespace, "", OLD, MODEL)

    async def enters(entrance: Entrance, now_ms: int) -> int:
        entrance.answered(await w.redis.execute_command(*entrance.command(now_ms)))
        return entrance.since_ms

    assert await enters(entrance, 5_000) == 5_000
    assert await enters(Entrance(namespace, "", OLD, MODEL), 6_000) == 5_000
    assert await enters(Entrance(namespace, "", YOUNG, MODEL), 7_000) == 7_000
    assert await w.operator.delete(cluster_key(namespace, OLD))
    assert await enters(entrance, 8_000) == 5_000


# -- a model that nobody serves ------------------------------------------------------------------


@asynccontextmanager
async def unserved(w: World, namespace: str) -> AsyncIterator[tuple[Unserved, list[Members]]]:
    """Who looks after what waits for the model's old name, and the members that it sees: the last
    of the list.
    """
    seen = [Members(trusted=True)]
    old, young = Entrance(namespace, "", OLD, MODEL), Entrance(namespace, "", YOUNG, RENAMED)
    for entrance, now_ms in ((old, 1_000), (young, 1_000 + timings.MODEL_GONE_MS)):
        entrance.answered(await w.redis.execute_command(*entrance.command(now_ms)))
    assert young.unserved == (MODEL,)
    async with a_world(w, namespace, RENAMED) as of:
        base = Foundation(of.settings, "hermes-ingress", "ingress-1")
        try:
            yield Unserved(base, of.endings, young, lambda: seen[-1]), seen
        finally:
            await base.stop()


async def test_what_waits_for_a_model_that_nobody_serves_is_refused(
    w: World, namespace: str
) -> None:
    async with unserved(w, namespace) as (looks, _):
        await w.admit("waits")
        await w.admit("batch", request_class="batch")
        await w.admit("claimed")
        await w.admit("begun")
        await w.queue().claim(2, ["standard"])
        await (await w.writer()).open("begun", 1, b"nonce", OPENED)
        await looks.sweep()
        for request_id in ("waits", "batch", "claimed", "begun"):
            assert await w.ending(request_id) == GONE
            assert await ended(w, request_id)
        assert await w.operator.zscore(models_key(namespace), MODEL) is not None
        await w.operator.zadd(open_batches_key(namespace, MODEL), {"batch": 1})
        await looks.sweep()
        assert await w.operator.zscore(models_key(namespace), MODEL) is not None
        await w.operator.zrem(open_batches_key(namespace, MODEL), "batch")
        await looks.sweep()
        assert await w.operator.zrange(models_key(namespace), 0, -1) == [RENAMED.encode()]


async def test_nothing_is_refused_that_somebody_may_still_answer(w: World, namespace: str) -> None:
    served = IngressLease("ingress-1", OLD, model=MODEL)
    async with unserved(w, namespace) as (looks, seen):
        await w.admit("waits")
        for members in (Members(), Members((served,), trusted=True)):
            seen.append(members)
            await looks.sweep()
            assert await w.ending("waits") == ("", "")
        seen.append(Members(trusted=True))
        back = Entrance(namespace, "", OLD, MODEL)  # and no look at the leases has shown it
        await w.redis.execute_command(*back.command(int(time.time() * 1000)))
        await looks.sweep()
        assert await w.ending("waits") == ("", "")
        assert await w.operator.zscore(models_key(namespace), MODEL) is not None


async def test_what_a_living_worker_answers_is_left_to_it(w: World, namespace: str) -> None:
    async with unserved(w, namespace) as (looks, seen):
        await w.admit("runs")
        await w.admit("waits")
        await (await w.writer()).open("runs", 1, b"nonce", OPENED)
        seen.append(Members(trusted=True, lately=frozenset({OPENED.replica})))
        await looks.sweep()
        assert (await w.ending("runs"), await w.ending("waits")) == (("", ""), GONE)
        seen.append(Members(trusted=True))
        await looks.sweep()
        assert await w.ending("runs") == GONE


async def test_a_long_queue_of_such_a_model_is_ended_part_by_part(
    w: World, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "UNSERVED_A_LOOK", 2)
    async with unserved(w, namespace) as (looks, seen):
        names = [f"req-{n}" for n in range(5)]
        for name in names:
            await w.admit(name)
        await (await w.writer()).open("req-0", 1, b"nonce", OPENED)
        seen.append(Members(trusted=True, lately=frozenset({OPENED.replica})))
        left = []
        for _ in range(3):
            await looks.sweep()
            left.append([name for name in names if await w.ending(name) != GONE])
        assert left == [["req-0", "req-2", "req-3", "req-4"], ["req-0", "req-4"], ["req-0"]]


async def test_after_a_rename_the_old_name_is_answered_until_its_cluster_ends(
    w: World, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a client that asks for what waited is told."""
    monkeypatch.setattr(timings, "MODEL_GONE_MS", 0)
    async with a_world(w, namespace, RENAMED) as other, cluster(other, YOUNG) as (_, young):
        async with a_world(w, namespace, MODEL) as of:
            async with cluster(of, OLD):
                await eventually(lambda: young.membership.members.trusted)
                await eventually(lambda: MODEL in young.entrance.unserved)
                await of.admit("answered")
                await eventually(lambda: ended(of, "answered"))
                assert (await of.ending("answered"))[0] == "completed"
            await of.admit(LATE, tenant="default")
            await eventually(lambda: ended(of, LATE))
            assert await of.ending(LATE) == GONE
        await eventually(lambda: MODEL not in young.entrance.unserved)
        async with door_of(young) as d:
            answer = await d.http.get(f"/v1/requests/{LATE}/response")
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "model_not_found"


# -- another service -----------------------------------------------------------------------------


async def statuses(ingress: IngressProcess, paths: Sequence[str]) -> list[int]:
    async with door_of(ingress) as d:
        got = [(await d.http.get(path)).status_code for path in paths]
        return [*got, (await d.post("Hello")).status_code]


async def test_another_service_in_the_namespace_is_refused_until_the_first_has_ended(
    w: World, namespace: str
) -> None:
    paths = ("/healthz", "/readyz", "/v1/requests/first", "/v1/requests", "/v1/models")
    async with (
        a_world(w, namespace, MODEL, "one") as of,
        a_world(w, namespace, MODEL, "two") as no,
        cluster(of, OLD) as (works, first),
        cluster(no, YOUNG) as (idles, second),
    ):
        await of.admit("first")
        await eventually(lambda: ended(of, "first"))
        assert (works.order, idles.order) == (["first"], [])
        ready, facts = second.readiness.report()
        assert not ready
        assert f"'{namespace}' of this Redis belongs to the service 'one'" in str(facts)
        assert await statuses(second, paths) == [200, 503, 503, 503, 503, 503]
        (lease,) = await w.redis.zrange(ingresses_key(namespace), 0, -1)
        assert IngressLease.decode(lease).cluster == OLD
        assert first.readiness.report()[0]
        assert warnings(first) == ""
        await first.stop()
        assert 0 < await w.redis.pttl(service_key(namespace)) <= timings.SERVICE_KNOWN_MS
        await w.redis.unlink(service_key(namespace))  # in a minute it goes by itself
        await eventually(lambda: second.entrance.let_in)
        await of.admit("later")
        await eventually(lambda: ended(of, "later"))
        assert idles.order == ["later"]


async def test_of_two_services_that_start_at_once_one_is_let_in(w: World, namespace: str) -> None:
    memberships = [Membership(w.link, namespace) for _ in range(6)]
    entrances = [Entrance(namespace, f"service-{n % 3}", OLD, MODEL) for n in range(6)]
    ingresses = zip(memberships, entrances, strict=True)
    joining = [one.join_as_ingress(lambda: IngressLease("i"), its) for one, its in ingresses]
    await asyncio.gather(*joining)
    let_in = {one._service for one in entrances if one.let_in}
    owner = (await w.redis.get(service_key(namespace))).decode()
    assert let_in == {owner}
    assert sum(one.let_in for one in entrances) == 2, "a service may have several ingresses"
    for one in memberships:
        await one.leave()


async def test_after_an_outage_the_service_that_was_there_comes_first(
    w: World, namespace: str
) -> None:
    """Redis may have dropped the name meanwhile, because nobody could renew it."""

    async def asks(entrance: Entrance, certain: bool = False) -> bool:
        command = entrance.command(int(time.time() * 1000), certain)
        entrance.answered(await w.redis.execute_command(*command))
        return entrance.let_in

    one, two = (Entrance(namespace, name, OLD, MODEL) for name in ("one", "two"))
    assert await asks(one)
    assert not await asks(two)
    await w.redis.unlink(service_key(namespace))
    assert not await asks(two), "'one' may only have been unable to renew it"
    assert "'one'" in two.refused
    assert await asks(one)
    assert not await asks(two, certain=True)
    await w.redis.unlink(service_key(namespace))
    assert await asks(two, certain=True)
    assert await asks(one), "who was let in stays"
    assert "belongs to the service 'two'" in one.warnings[0]
    assert two.warnings == ()


async def test_services_without_a_name_are_not_compared(w: World, namespace: str) -> None:
    async with (
        a_world(w, namespace, MODEL, "one") as of,
        a_world(w, namespace, RENAMED) as other,
        cluster(of, OLD) as (_, first),
        cluster(other, YOUNG) as (_, second),
    ):
        assert (first.entrance.let_in, second.entrance.let_in) == (True, True)
        assert await w.redis.get(service_key(namespace)) == b"one"
