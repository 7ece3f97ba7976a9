"""A deadline is enforced whatever the request waits for: by the ingress with its connection, and by
the search of the queues.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import httpx
import pytest

from serve_app import timings
from serve_app.clock import SYSTEM, Clock, RedisClock
from serve_app.loops import Loops
from serve_app.request_queue import QueueDepths
from serve_app.requests.endings import Deadlines
from tests.journal.in_process import Door, door
from tests.journal.journal_helpers import PrivateRedis, World, world
from tests.turned_clock import TurnedClock
from tests.waiting import eventually

TIMEOUT_S = 0.3
EXPIRED = ("expired", "deadline")


def deadlines(w: World, clock: Clock = SYSTEM) -> Deadlines:
    return Deadlines(w.endings, QueueDepths(w.queue()), RedisClock(clock), Loops())


def asked(d: Door) -> asyncio.Task[httpx.Response]:
    """A client that waits for its whole answer."""
    body = {"model": "hermes-tiny", "prompt": "Hi"}
    headers = {"x-request-timeout-seconds": str(TIMEOUT_S)}
    return asyncio.create_task(d.http.post("/v1/completions", json=body, headers=headers))


async def is_told(asking: asyncio.Task[httpx.Response]) -> None:
    """The client, of its deadline."""
    answer = await asking
    assert (answer.status_code, answer.headers["x-hermes-reason"]) == (504, "deadline")


async def test_a_client_is_answered_a_moment_after_its_deadline_however_late_it_is(
    w: World,
) -> None:
    clock, deadline_s = TurnedClock(), 1_000.0
    keeps, due_s = deadlines(w, clock), []
    for left_s in (60.0, 0.0, -60.0):
        clock.unix_offset_s = deadline_s - left_s - clock.now_s
        due_s.append(keeps.due_in_s(int(deadline_s * 1000)))
    assert due_s == [61.0, 1.0, 1.0]


async def test_a_client_of_an_unclaimed_request_is_answered_at_its_deadline(
    w: World, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "EXPIRE_WITHIN_S", 60.0)  # no machine is too slow to record it
    async with door(redis_url, namespace) as d:
        deadline_s = time.time() + TIMEOUT_S
        await is_told(asked(d))
        assert time.time() >= deadline_s
        (request_id,) = await w.journals()
        assert await w.ending(request_id) == EXPIRED
        assert d.ingress.followers.request_ids == []


async def test_a_client_is_answered_at_its_deadline_while_redis_hangs_and_redis_is_updated_later(
    private_redis: PrivateRedis, namespace: str
) -> None:
    async with (
        world(private_redis.url, namespace) as w,
        door(private_redis.url, namespace) as d,
    ):
        asking = asked(d)
        (request_id,) = await d.waiting(1)
        await eventually(lambda: w.journals())
        os.kill(private_redis.pid, signal.SIGSTOP)
        try:
            for follower in d.ingress.followers._followers[request_id]:
                follower.wake(stale=True)  # it will wait for Redis when its time comes
            await is_told(asking)
        finally:
            os.kill(private_redis.pid, signal.SIGCONT)
        await eventually(lambda: has_expired(w, request_id))


async def has_expired(w: World, request_id: str = "req_1") -> bool:
    return await w.ending(request_id) == EXPIRED


async def test_what_waits_too_long_without_a_connection_ends_and_leaves_its_line(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "OVERDUE_A_LOOK", 3)
    monkeypatch.setattr(timings, "DEADLINE_GRACE_S", 120.0)
    queue, stream = w.queue(), w.stream("standard")
    await w.admit("claimed", timeout_s=-300)
    assert [entry.request_id for entry in await queue.claim(1)] == ["claimed"]
    await w.redis.xadd(stream, {"x": "nobody can decode this"})
    for number in range(6):
        await w.admit(f"patient_{number}", timeout_s=300)
        await w.admit(f"late_{number}", timeout_s=-300)
    await w.admit("just_late", timeout_s=0)
    keeps = deadlines(w)
    looks = 0
    while any([await w.redis.exists(w.store.body_key(f"late_{number}")) for number in range(6)]):
        await keeps.sweep()
        looks += 1
    assert looks > 2, "a few entries at a time"
    left = [fields.get(b"r") for _, fields in await w.redis.xrange(stream)]
    patient = [b"patient_%d" % number for number in range(6)]
    assert left == [b"claimed", None, *patient, b"just_late"]
    assert all([await has_expired(w, f"late_{number}") for number in range(6)])
