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
from serve_app.contract import Reason
from serve_app.errors import RequestRefused
from tests.journal.admitting import admitting, ending, journals
from tests.journal.cable import HANGING, UNANSWERED, UNSENT, Cable
from tests.journal.journal_helpers import PrivateRedis, World, world
from tests.waiting import eventually

MAY_COME_S = 3600.0
SOON: dict[str, Any] = {"ingress": {"disconnect_grace_s": 0.05}}


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
async def at_a_cable(redis_url: str, namespace: str) -> AsyncIterator[tuple[World, Cable]]:
    """A world whose connections to Redis can be cut."""
    cable = Cable(redis_url)
    await cable.start()
    async with world(cable.url, namespace, **SOON) as w:
        yield w, cable
    cable.drop()


async def test_a_request_that_is_read_elsewhere_is_not_cancelled_though_clocks_differ(
    redis_url: str, namespace: str
) -> None:
    async with (
        world(redis_url, namespace, **SOON) as w,
        admitting(w, "a", +4) as ahead,
        admitting(w, "b", -4) as behind,
    ):
        follower, _ = await ahead.post()
        await behind.disconnects.arrived(follower.request_id)
        ahead.disconnects.left(follower, departed=True)
        await ahead.quiet()
        assert await ending(w, follower.request_id) == ""


async def test_a_reader_that_could_not_renew_its_lease_while_redis_hung_has_not_left(
    private_redis: PrivateRedis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        world(private_redis.url, namespace, **SOON) as w,
        admitting(w, "a") as left,
        admitting(w, "b") as reading,
    ):
        zrem, zcount = w.redis.zrem, w.redis.zcount
        asked, renewed, looks = asyncio.Event(), asyncio.Event(), []

        def removing(*args: Any) -> Any:
            asked.set()
            return zrem(*args)

        async def counting(*args: Any) -> Any:
            looks.append(args)
            if len(looks) > 1:
                await renewed.wait()
            return await zcount(*args)

        monkeypatch.setattr(w.redis, "zrem", removing)
        monkeypatch.setattr(w.redis, "zcount", counting)
        follower, _ = await left.post()
        await reading.disconnects.arrived(follower.request_id)
        os.kill(private_redis.pid, signal.SIGSTOP)
        left.disconnects.left(follower, departed=True)
        await asked.wait()
        for its in (left, reading):
            its.local.ahead_s = timings.READER_LEASE_MS / 1000 + 1
        os.kill(private_redis.pid, signal.SIGCONT)
        await reading.disconnects.arrived(follower.request_id)
        renewed.set()
        await left.quiet()
        assert len(looks) > 1, "the lease had ended, but Redis's answer came too late to count"
        assert await ending(w, follower.request_id) == ""


async def test_a_request_without_readers_is_cancelled(redis_url: str, namespace: str) -> None:
    async with world(redis_url, namespace, **SOON) as w, admitting(w) as its:
        follower, _ = await its.post()
        its.disconnects.left(follower, departed=True)
        await its.quiet()
        assert await ending(w, follower.request_id) == Reason.CLIENT_DISCONNECTED


@pytest.mark.parametrize("key", ["", "a key"])
async def test_a_client_that_leaves_while_it_is_admitted_leaves_nothing_behind(
    redis_url: str, namespace: str, key: str
) -> None:
    async with at_a_cable(redis_url, namespace) as (w, cable), admitting(w) as its:
        cable.cut("EXEC", HANGING)
        posting = asyncio.create_task(its.post(key))
        await cable.hung.wait()
        posting.cancel()
        await asyncio.gather(posting, return_exceptions=True)
        assert its.followers.request_ids == []
        # Nothing more is answered on the connection that hangs.
        w.link._settings = w.settings.redis.model_copy(update={"response_timeout_s": 0.3})
        await cable.arrive()  # nobody waits for it any more
        assert len(its.limits.waiting) == 1, "it may wait"
        await its.quiet()
        assert len(its.limits.waiting) == 0
        (request_id,) = await journals(w)
        assert await ending(w, request_id) == Reason.CLIENT_DISCONNECTED


@pytest.mark.parametrize("key", ["", "a key"])
async def test_a_request_that_never_reaches_redis_is_looked_for_as_long_as_it_may_come(
    redis_url: str, namespace: str, key: str
) -> None:
    async with at_a_cable(redis_url, namespace) as (w, cable), admitting(w) as its:
        cable.cut("EXEC", UNSENT)
        with pytest.raises(RequestRefused):
            await its.post(key)
        looks, outline = 0, w.store.outline

        async def looking(request_id: str) -> Any:
            nonlocal looks
            looks += 1
            return await outline(request_id)

        w.store.outline = looking  # type: ignore[method-assign]
        await eventually(lambda: looks > 2)
        assert len(its.limits.waiting) == 1, "it may come"
        its.local.ahead_s = MAY_COME_S + 1
        await its.quiet()
        assert len(its.limits.waiting) == 0
        assert await journals(w) == []


@pytest.mark.parametrize("key", ["", "a key"])
async def test_a_request_whose_admission_was_not_answered_is_cancelled(
    redis_url: str, namespace: str, key: str
) -> None:
    async with at_a_cable(redis_url, namespace) as (w, cable), admitting(w) as its:
        cable.cut("EXEC", UNANSWERED)
        with pytest.raises(RequestRefused) as refusal:
            await its.post(key)
        assert refusal.value.reason == Reason.JOURNAL_UNAVAILABLE
        assert len(its.limits.waiting) == 1, "it may wait"
        await its.quiet()
        assert len(its.limits.waiting) == 0
        (request_id,) = await journals(w)
        assert await ending(w, request_id) == Reason.CLIENT_DISCONNECTED


async def test_where_redis_cannot_be_reached_nothing_is_left_to_look_after(namespace: str) -> None:
    async with world("redis://127.0.0.1:1/0", namespace) as w, admitting(w) as its:
        with pytest.raises(RequestRefused):
            await its.post()
        assert not its.disconnects._tasks


async def test_a_keyed_request_whose_admission_was_not_answered_lives_if_its_client_reconnects(
    redis_url: str, namespace: str
) -> None:
    async with (
        at_a_cable(redis_url, namespace) as (w, cable),
        admitting(w, "a") as its,
        admitting(w, "b") as other,
    ):
        cable.cut("EXEC", UNANSWERED)
        with pytest.raises(RequestRefused):
            await its.post("a key")
        follower, _ = await other.post("a key")
        await its.quiet()
        assert await ending(w, follower.request_id) == ""
        other.disconnects.left(follower, departed=True)
        await other.quiet()
        assert await ending(w, follower.request_id) == Reason.CLIENT_DISCONNECTED


async def test_a_client_that_leaves_does_not_cancel_what_another_has_admitted_under_its_key(
    redis_url: str, namespace: str
) -> None:
    async with (
        at_a_cable(redis_url, namespace) as (w, cable),
        world(redis_url, namespace, **SOON) as beside,
        admitting(w, "a") as its,
        admitting(beside, "b") as other,
    ):
        cable.cut("EXEC", HANGING)
        posting = asyncio.create_task(its.post("a key"))
        await cable.hung.wait()
        follower, _ = await other.post("a key")
        posting.cancel()
        await asyncio.gather(posting, return_exceptions=True)
        await cable.arrive()
        await its.quiet()
        assert await journals(w) == [follower.request_id]
        assert await ending(w, follower.request_id) == ""


async def test_a_reader_that_leaves_while_it_attaches_is_not_relied_upon(
    redis_url: str, namespace: str
) -> None:
    async with (
        world(redis_url, namespace, **SOON) as w,
        at_a_cable(redis_url, namespace) as (cut, cable),
        admitting(w, "a") as its,
        admitting(cut, "b") as other,
    ):
        follower, _ = await its.post("a key")
        cable.cut("EXISTS", HANGING)  # it has its lease already
        attaching = asyncio.create_task(other.post("a key"))
        await cable.hung.wait()
        its.disconnects.left(follower, departed=True)
        await its.quiet()
        assert await ending(w, follower.request_id) == ""
        attaching.cancel()
        await asyncio.gather(attaching, return_exceptions=True)
        await other.quiet()
        assert await ending(w, follower.request_id) == Reason.CLIENT_DISCONNECTED
