"""Clients that leave: all ingresses know who reads, and a request without readers is cancelled."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from serve_app import timings
from serve_app.cluster.members import Members
from serve_app.contract import Reason
from serve_app.errors import RequestRefused
from serve_app.ingress.followers import Followers
from serve_app.redis.keyspace import readers_key
from tests.journal.admitting import StillIngress, admitting
from tests.journal.cable import HANGING, UNANSWERED, UNSENT, Cable, behind
from tests.journal.journal_helpers import PrivateRedis, World, world
from tests.waiting import eventually

MAY_COME_S = 3600.0
SOON: dict[str, Any] = {"ingress": {"disconnect_grace_s": 0.05}}
RUNS, LEFT = ("", ""), ("cancelled", "client_disconnected")


@pytest.fixture
def sections() -> dict[str, Any]:
    return SOON


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses; what is waited for comes, or the clock is turned. A look at Redis's clock would
    turn it back.
    """
    monkeypatch.setattr(timings, "ADMISSION_MAY_COME_S", MAY_COME_S)
    monkeypatch.setattr(timings, "CANCEL_RETRY_S", 0.05)
    monkeypatch.setattr(timings, "READER_RENEW_S", 0.05)
    monkeypatch.setattr(timings, "LEASE_RENEW_S", 1e6)


@asynccontextmanager
async def at_a_cable(
    w: World, name: str = "ingress-1"
) -> AsyncIterator[tuple[StillIngress, Cable]]:
    """An ingress whose connections to Redis can be cut."""
    async with (
        Cable(w.settings.redis.url) as cable,
        admitting(behind(cable, w.settings), name) as its,
    ):
        yield its, cable


async def leaves(posting: asyncio.Task[Any]) -> None:
    """The client of a request that is being admitted."""
    posting.cancel()
    await asyncio.gather(posting, return_exceptions=True)


async def arrives_unanswered(its: StillIngress, cable: Cable) -> None:
    """Redis executes what hung, and nothing more is answered on its connection."""
    its.base.link._within_s = 0.3
    await cable.arrive()


async def test_a_request_that_is_read_elsewhere_is_not_cancelled_though_clocks_differ(
    w: World,
) -> None:
    async with admitting(w.settings, "a", +4) as ahead, admitting(w.settings, "b", -4) as behind:
        follower, _ = await ahead.post()
        await behind.disconnects.arrived(follower.request_id)
        ahead.disconnects.left(follower, departed=True)
        await ahead.quiet()
        assert await w.ending(follower.request_id) == RUNS


async def test_a_reader_that_is_written_down_late_because_redis_hung_has_not_left(
    private_redis: PrivateRedis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        world(private_redis.url, namespace, **SOON) as w,
        admitting(w.settings, "b") as reading,
        admitting(w.settings, "a") as left,
    ):
        call = left.base.link.call
        asked, looked, written = asyncio.Event(), asyncio.Event(), asyncio.Event()
        looks = 0

        async def counting(commands: Any, large: bool = False) -> Any:
            nonlocal looks
            if commands[0][0] != "ZREM":
                return await call(commands, large)
            looks += 1
            if looks > 1:
                await written.wait()
            else:
                os.kill(private_redis.pid, signal.SIGSTOP)
            asked.set()
            found = await call(commands)
            looked.set()
            return found

        monkeypatch.setattr(left.base.link, "call", counting)
        follower, _ = await left.post()
        left.disconnects.left(follower, departed=True)
        await asked.wait()
        left.local.ahead_s = timings.READER_SLOW_S + 1
        os.kill(private_redis.pid, signal.SIGCONT)
        await looked.wait()
        await reading.disconnects.arrived(follower.request_id)
        written.set()
        await left.quiet()
        assert looks > 1, "Redis's answer came too late to count"
        assert await w.ending(follower.request_id) == RUNS


async def test_who_reads_at_an_ingress_that_has_died_reads_no_more_once_that_is_certain(
    w: World, its: StillIngress
) -> None:
    follower, _ = await its.post()
    async with admitting(w.settings, "dead") as dead:
        await dead.disconnects.arrived(follower.request_id)
    looks = 0

    def members() -> Members:
        nonlocal looks
        looks += 1
        return Members(trusted=looks > 2)

    its.disconnects.members = members
    its.disconnects.left(follower, departed=True)
    await its.quiet()
    assert looks == 3
    assert await w.ending(follower.request_id) == LEFT


async def test_readers_cost_a_command_each_and_not_again_while_they_read(
    w: World, its: StillIngress, monkeypatch: pytest.MonkeyPatch
) -> None:
    followers = [(await its.post())[0] for _ in range(20)]
    looks = 0

    def read(_: Any) -> list[str]:
        nonlocal looks
        looks += 1
        return [follower.request_id for follower in followers]

    monkeypatch.setattr(Followers, "request_ids", property(read))
    await w.operator.config_resetstat()
    await its.disconnects.start()
    await eventually(lambda: looks > 5)
    stats = await w.operator.info("commandstats")
    assert stats["cmdstat_zadd"]["calls"] == len(followers)
    key = readers_key(w.settings.namespace, followers[0].request_id)
    assert await w.operator.zrange(key, 0, -1) == [b"ingress-1"]
    assert 0 < await w.redis.pttl(key) <= timings.READER_KNOWN_MS


@pytest.mark.parametrize("where", ["here", "nearly here", "elsewhere"])
async def test_a_client_that_comes_back_at_the_end_of_its_grace_is_not_cancelled(
    w: World, its: StillIngress, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """While the ingress reads the journal, or asks Redis who reads."""
    follower, _ = await its.post()
    name, told = follower.request_id, asyncio.Event()
    call, record = its.base.link.call, its.base.store.record
    coming: list[asyncio.Task[Any]] = []

    async def calling(commands: Any, large: bool = False) -> Any:
        if commands[0][0] == "ZADD":
            await told.wait()
        found = await call(commands, large)
        if commands[0][0] == "ZREM" and where != "elsewhere" and not coming:
            coming.append(asyncio.create_task(its.disconnects.attach(name, 0)))
            if where == "here":
                told.set()
                await asyncio.wait(coming)
            else:  # it has not been written down yet
                await eventually(lambda: its.disconnects.arriving)
        return found

    async def reading(request_id: str) -> Any:
        found = await record(request_id)
        await other.disconnects.arrived(request_id)
        return found

    async with admitting(w.settings, "other") as other:
        monkeypatch.setattr(its.base.link, "call", calling)
        if where == "elsewhere":
            monkeypatch.setattr(its.base.store, "record", reading)
        its.disconnects.left(follower, departed=True)
        await its.quiet()
        told.set()
        await asyncio.gather(*coming)
        assert await w.ending(name) == RUNS
        assert not its.disconnects.arriving
        for task in coming:
            its.disconnects.left(task.result(), departed=True)
        if coming:
            await its.quiet()
            assert await w.ending(name) == LEFT, "and is, once it has left again"


async def test_a_request_without_readers_is_cancelled(w: World, its: StillIngress) -> None:
    follower, _ = await its.post()
    its.disconnects.left(follower, departed=True)
    await its.quiet()
    assert await w.ending(follower.request_id) == LEFT


@pytest.mark.parametrize("key", ["", "a key"])
@pytest.mark.parametrize("how", [HANGING, UNANSWERED], ids=["it leaves", "it is refused"])
async def test_a_client_that_is_not_told_of_its_admission_leaves_nothing_behind(
    w: World, key: str, how: str
) -> None:
    async with at_a_cable(w) as (its, cable):
        cable.cut("EVAL", how)
        posting = asyncio.create_task(its.post(key))
        if how == HANGING:
            await cable.hung.wait()
            await leaves(posting)
            await arrives_unanswered(its, cable)
        else:
            with pytest.raises(RequestRefused) as refusal:
                await posting
            assert refusal.value.reason == Reason.JOURNAL_UNAVAILABLE
        assert its.followers.request_ids == []
        assert len(its.limits.waiting) == 1, "it may wait"
        await its.quiet()
        assert len(its.limits.waiting) == 0
        (request_id,) = await w.journals()
        assert await w.ending(request_id) == LEFT


async def test_a_detached_request_that_is_accepted_at_a_repeat_is_no_longer_doubted(
    w: World,
) -> None:
    """At the first time it got a 503, although Redis has it."""
    async with at_a_cable(w) as (its, cable):
        its.disconnects.base.settings = w.settings.model_copy(
            update={"ingress": w.settings.ingress.model_copy(update={"disconnect_grace_s": 3600})}
        )
        cable.cut("EVAL", UNANSWERED)
        with pytest.raises(RequestRefused):
            await its.post("a key", prefer="respond-async")
        assert its.disconnects.tasks
        follower, facts = await its.post("a key", prefer="respond-async")
        assert facts.detached
        await eventually(lambda: not its.disconnects.tasks)
        assert len(its.limits.waiting) == 0
        assert await w.ending(follower.request_id) == RUNS


@pytest.mark.parametrize("key", ["", "a key"])
async def test_a_request_that_never_reaches_redis_is_looked_for_as_long_as_it_may_come(
    w: World, key: str
) -> None:
    async with at_a_cable(w) as (its, cable):
        cable.cut("EVAL", UNSENT)
        with pytest.raises(RequestRefused):
            await its.post(key)
        looks, record = 0, its.base.store.record

        async def looking(request_id: str) -> Any:
            nonlocal looks
            looks += 1
            return await record(request_id)

        its.base.store.record = looking  # type: ignore[method-assign]
        await eventually(lambda: looks > 2)
        assert len(its.limits.waiting) == 1, "it may come"
        its.local.ahead_s = MAY_COME_S + 1
        await its.quiet()
        assert len(its.limits.waiting) == 0
        assert await w.journals() == []


async def test_where_redis_cannot_be_reached_nothing_is_left_to_look_after(namespace: str) -> None:
    async with (
        world("redis://127.0.0.1:1/0", namespace) as w,
        admitting(w.settings) as its,
    ):
        with pytest.raises(RequestRefused):
            await its.post()
        assert not its.disconnects.tasks


async def test_a_client_that_leaves_does_not_cancel_what_another_has_admitted_under_its_key(
    w: World,
) -> None:
    async with at_a_cable(w, "a") as (its, cable), admitting(w.settings, "b") as other:
        cable.cut("EVAL", HANGING)
        posting = asyncio.create_task(its.post("a key"))
        await cable.hung.wait()
        follower, _ = await other.post("a key")
        await leaves(posting)
        await arrives_unanswered(its, cable)
        await its.quiet()
        assert await w.journals() == [follower.request_id]
        assert await w.ending(follower.request_id) == RUNS


async def test_a_reader_that_leaves_while_it_attaches_is_not_relied_upon(w: World) -> None:
    async with admitting(w.settings, "a") as its, at_a_cable(w, "b") as (other, cable):
        follower, _ = await its.post("a key")
        cable.cut("EXISTS", HANGING)  # it has its lease already
        attaching = asyncio.create_task(other.post("a key"))
        await cable.hung.wait()
        its.disconnects.left(follower, departed=True)
        await its.quiet()
        assert await w.ending(follower.request_id) == RUNS
        await leaves(attaching)
        await other.quiet()
        assert await w.ending(follower.request_id) == LEFT
