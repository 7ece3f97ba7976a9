"""A deadline is kept whatever the request waits for, and its client is answered even if Redis
hangs.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import httpx
import msgspec
import pytest

from serve_app import timings
from serve_app.contract import Reason, State
from serve_app.ingress.exchange import Exchange
from serve_app.journal.entries import EntryId, Head, Summary
from serve_app.loops import Loops
from serve_app.redis.keyspace import due_key
from serve_app.requests.deadlines import Deadlines
from tests.journal.in_process import Door, door
from tests.journal.journal_helpers import FACTS, OPENED, PrivateRedis, World, world
from tests.waiting import eventually

TIMEOUT_S = 0.3
EXPIRED = ("expired", "deadline")


def asked(d: Door) -> asyncio.Task[httpx.Response]:
    """A client that waits for its whole answer."""
    body = {"model": "hermes-tiny", "prompt": "Hi"}
    headers = {"x-request-timeout-seconds": str(TIMEOUT_S)}
    return asyncio.create_task(d.http.post("/v1/completions", json=body, headers=headers))


async def is_told(asking: asyncio.Task[httpx.Response]) -> None:
    """The client, of its deadline."""
    answer = await asking
    assert (answer.status_code, answer.headers["x-hermes-reason"]) == (504, "deadline")


async def test_a_client_of_an_unclaimed_request_is_answered_at_its_deadline(
    w: World, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "DEADLINE_ANSWERED_S", 60.0)  # the journal tells it
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


async def test_an_answer_of_many_pages_is_read_to_its_end_long_after_its_deadline(
    w: World, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "FIRST_PAGE_ENTRIES", 1)
    facts = msgspec.structs.replace(FACTS, tenant="default", streamed=False, detached=True)
    await w.accept("req_1", facts)
    attempt = await w.opened(await w.writer())
    head: Head | None = Head(200, [("content-type", "application/json")])
    for letter in b"whole":
        attempt.append([[0, "", [], None, None, None]], [b"%c" % letter], 0, head)
        await eventually(lambda: not attempt.pending)
        head = None
    attempt.stop(State.COMPLETED, None, Summary(facts, OPENED, 1, 9))
    await attempt.closed
    async with door(redis_url, namespace) as d:
        answer = await d.http.get("/v1/requests/req_1/response")
    assert (answer.status_code, answer.content) == (200, b"whole")


async def test_a_client_whose_answer_is_still_read_is_not_told_of_a_deadline(
    w: World, redis_url: str, namespace: str
) -> None:
    """Only if nothing has come since."""
    async with door(redis_url, namespace) as d:
        follower = (await w.hub()).follow_new("req_1")
        parts = d.ingress.exchanges.parts
        exchange = Exchange(parts, follower, "/v1/completions", FACTS, streamed=False)
        exchange._set_alarm(3_600.0)
        follower.reader.position = EntryId(1, 1)
        exchange._ring()
        assert (exchange._overdue, follower.due_at is None) == (False, False)
        exchange._ring()
        assert (exchange._overdue, follower.due_at is None) == (True, True)


async def has_expired(w: World, request_id: str = "req_1") -> bool:
    return await w.ending(request_id) == EXPIRED


async def test_nothing_ends_by_the_clock_of_a_machine(w: World) -> None:
    keeps = Deadlines(w.link, w.settings.namespace, w.endings, Loops())
    await w.admit(timeout_s=-300)
    await keeps.sweep()
    assert await w.ending() == ("", "")
    w.told_the_time()
    await keeps.sweep()
    assert await has_expired(w)


async def test_whatever_it_waits_for_a_late_request_ends_and_leaves_its_queue(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "OVERDUE_A_LOOK", 3)
    monkeypatch.setattr(timings, "DEADLINE_GRACE_S", 120.0)
    queue, stream = w.queue(), w.stream("standard")
    keeps = Deadlines(w.link, w.settings.namespace, w.endings, Loops())
    w.told_the_time()
    writer = await w.writer()
    late = {"claimed", "running", "lost", *(f"late_{number}" for number in range(6))}
    for name in ("claimed", "running", "lost"):
        await w.admit(name, timeout_s=-300)
    assert len(await queue.claim(3, ["standard"])) == 3
    await writer.open("running", 1, b"nonce", OPENED)  # and its worker hangs
    await w.redis.xtrim(stream, minid="9-0")  # a fail-over has lost queue entries
    await w.redis.xadd(stream, {"x": "nobody can decode this"})
    for number in range(6):
        await w.admit(f"patient_{number}", timeout_s=300)
        await w.admit(f"late_{number}", timeout_s=-300)
    await w.admit("just_late", timeout_s=0)
    await w.admit("ended_by_an_older_version", timeout_s=-300)
    await w.redis.zadd(due_key(w.settings.namespace), {"gone": 1})
    assert await w.endings.end("ended_by_an_older_version", Reason.CANCELLED)
    await w.redis.zadd(due_key(w.settings.namespace), {"ended_by_an_older_version": 1})
    for _ in range(4):
        assert not all([await has_expired(w, name) for name in late]), "a few at a time"
        await keeps.sweep()
    assert all([await has_expired(w, name) for name in late])
    patient = {f"patient_{number}" for number in range(6)}
    left = [fields.get(b"r") for _, fields in await w.redis.xrange(stream)]
    assert set(left) == {None, b"just_late", *(name.encode() for name in patient)}
    assert {*await w.redis.zrange(due_key(w.settings.namespace), 0, -1)} == {
        name.encode() for name in (*patient, "just_late")
    }
    assert (await w.ending("ended_by_an_older_version"))[0] == State.CANCELLED
