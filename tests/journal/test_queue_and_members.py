"""The queues, and the leases with what engines report beside them, on a real Redis."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from itertools import count

import pytest

from serve_app import timings
from serve_app.cluster.leases import Membership
from serve_app.cluster.members import Members
from serve_app.contract import (
    CompletionStats,
    EngineReport,
    IngressLease,
    Reason,
    State,
    WorkerLease,
)
from serve_app.dispatch.attempts import written_in_journal
from serve_app.errors import RedisUnavailable
from serve_app.journal.entries import Summary
from serve_app.journal.usage import Usage
from serve_app.policy.classes import CLASSES
from serve_app.policy.work import Work
from serve_app.redis.connection import Command
from serve_app.redis.keyspace import engines_key, ingresses_key, workers_key
from serve_app.redis.replies import Reply
from serve_app.request_queue import QueueDepths, RequestQueue, encode_entry
from tests.journal.journal_helpers import FACTS, HEAD, OPENED, World
from tests.waiting import eventually

SUMMARY_OF_42 = Summary(FACTS, None, 1, 9, first_output_ms=5)


async def enqueue(w: World, request_class: str, *request_ids: str) -> None:
    for request_id in request_ids:
        fields = encode_entry(request_id, "tenant", "session", 123, Work(7))
        await w.redis.xadd(w.stream(request_class), {**fields})


async def claimed(queue: RequestQueue, of_each: int, *classes: str) -> list[str]:
    entries = await queue.claim(of_each, classes or CLASSES)
    return [entry.request_id for entry in entries]


async def test_a_claim_gives_back_what_was_enqueued_with_what_it_costs(w: World) -> None:
    before_ms = int(time.time() * 1000) - 1_000
    fields = encode_entry("req_1", "tenant", "session", 123, Work(7, 9, "chat s1"))
    assert set(fields) == {*"rtsdciok"}
    await w.redis.xadd(w.stream("batch"), fields)
    (entry,) = await w.queue().claim(1)
    assert (entry.request_id, entry.tenant, entry.session) == ("req_1", "tenant", "session")
    assert (entry.deadline_ms, entry.request_class, entry.kind) == (123, "batch", "chat s1")
    assert (entry.prompt_tokens, entry.max_output_tokens, entry.cost_tokens) == (7, 9, 16)
    assert before_ms < entry.accepted_ms < before_ms + 60_000


async def test_a_claim_takes_the_oldest_of_the_classes_that_it_names(w: World) -> None:
    await enqueue(w, "batch", "b1", "b2")
    await enqueue(w, "standard", "s1")
    await enqueue(w, "realtime", "r1", "r2", "r3")
    queue = w.queue()
    assert await claimed(queue, 2, "realtime", "standard") == ["r1", "r2", "s1"]
    assert await claimed(queue, 1) == ["r3", "b1"]
    assert await claimed(queue, 2, "batch") == ["b2"]
    assert await claimed(queue, 8) == [], "an idle queue is no error"


async def test_a_claim_that_does_not_wait_is_answered_at_once(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "CLAIM_BLOCK_MS", 50_000)
    await enqueue(w, "standard", "s1")
    queue = w.queue()
    async with asyncio.timeout(40):
        assert await queue.claim(8, ["realtime"], wait=False) == []
    assert await claimed(queue, 8) == ["s1"]


async def test_an_arrival_ends_the_wait_for_one(w: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "CLAIM_BLOCK_MS", 500_000)
    queue = w.queue()

    async def waiting(clients: int) -> bool:
        return bool((await w.redis.info("clients"))["blocked_clients"] == clients)

    gone = asyncio.create_task(claimed(w.queue("ingress-2"), 8))
    await eventually(lambda: waiting(1))
    gone.cancel()
    await eventually(lambda: waiting(0))  # or the entry would be claimed for nobody
    claim = asyncio.create_task(claimed(queue, 8))
    await eventually(lambda: waiting(1))
    await enqueue(w, "standard", "s1")
    assert await claim == ["s1"]


async def test_acknowledged_entries_are_deleted_and_others_stay_claimed(w: World) -> None:
    await enqueue(w, "standard", "s1", "s2", "s3")
    await enqueue(w, "batch", "b1")
    queue = w.queue()
    depths = await w.depths()
    assert [(d.waiting, d.claimed) for d in depths.values()] == [(0, 0)] * 2 + [(3, 0), (1, 0)]
    assert depths["realtime"].oldest_s == 0
    assert 0 <= depths["standard"].oldest_s < 30
    first, _ = await queue.claim(2, ["standard"])
    await queue.acknowledge(first)
    depths = await w.depths()
    assert (depths["standard"].waiting, depths["standard"].claimed) == (1, 1)
    assert await w.redis.xlen(w.stream("standard")) == 2
    await queue.acknowledge(first)  # twice is once
    assert (await w.depths())["standard"].claimed == 1


async def test_a_redis_that_was_emptied_is_prepared_again(w: World) -> None:
    queue, looker = w.queue(), QueueDepths(w.queue())
    await enqueue(w, "standard", "s1")
    assert await claimed(queue, 1) == ["s1"]
    await looker.look()
    await w.operator.flushall()
    await enqueue(w, "standard", "s2")
    assert await claimed(queue, 1) == []  # this claim finds no group and makes it
    assert await claimed(queue, 1) == ["s2"]
    await w.operator.flushall()
    with pytest.raises(RedisUnavailable):
        await looker.look()
    assert (await looker.look())[0]["standard"].waiting == 0


# -- leases --------------------------------------------------------------------------------------


def an_ingress(name: str = "ingress-1", complete: bool = False) -> IngressLease:
    return IngressLease(name, "session-1", complete)


async def test_members_see_each_other_and_a_leaver_at_once(w: World, namespace: str) -> None:
    looks: list[Members] = []
    worker = Membership(w.link, namespace)
    ingress = Membership(w.link, namespace, looks.append)
    await worker.join_as_worker("replica|with-a-bar", lambda _: 16)
    await ingress.join_as_ingress(an_ingress)
    assert ingress.reachable
    assert looks[-1] == Members((an_ingress(),), (WorkerLease("replica|with-a-bar", 16),))
    await worker.leave()
    await ingress._renew()
    assert looks[-1].workers == ()
    await ingress.leave()


async def test_the_lease_of_a_dead_process_expires(
    w: World, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "LEASE_MS", 2_000)
    monkeypatch.setattr(timings, "LEASE_RENEW_S", 0.02)
    looks: list[Members] = []
    dying, living = Membership(w.link, namespace), Membership(w.link, namespace, looks.append)
    await dying.join_as_ingress(lambda: an_ingress("ingress-2"))
    await living.join_as_ingress(an_ingress)
    assert looks[0].names == ("ingress-1", "ingress-2")
    assert dying._task is not None
    dying._task.cancel()  # as a crash would: nothing is given back
    await eventually(lambda: looks[-1].names == ("ingress-1",))
    assert await w.redis.zcard(ingresses_key(namespace)) == 1  # and is cleaned away
    await living.leave()


async def test_ingresses_read_with_the_leases_what_each_engine_reports(
    w: World, namespace: str
) -> None:
    used, seen = count(1), list[Members]()
    worker = Membership(w.link, namespace)
    await worker.join_as_worker(
        "worker-1", lambda _: 8, lambda: EngineReport("worker-1", 4096, 512, next(used), 2, 1, 3)
    )
    ingress = Membership(w.link, namespace, seen.append)
    await ingress.join_as_ingress(an_ingress)
    await eventually(lambda: len({one.engines for one in seen}) > 2)
    assert all(len(one.engines) == 1 for one in seen), "the one before is gone"
    (report,) = seen[0].engines
    assert report._replace(used_tokens=0) == EngineReport("worker-1", 4096, 512, 0, 2, 1, 3)
    await worker.leave()
    await eventually(lambda: not seen[-1].engines)
    await ingress.leave()
    assert not await w.operator.exists(engines_key(namespace))


async def test_a_worker_of_an_older_version_reports_nothing_and_a_malformed_report_hides_no_other(
    w: World, namespace: str
) -> None:
    later_ms = 2**40 * 1000
    await w.operator.zadd(workers_key(namespace), {WorkerLease("worker-0", 4).encode(): later_ms})
    reports = ("worker-1|x", "worker-2|96|32|0|0|0|0|m|of a later version")
    await w.operator.zadd(engines_key(namespace), dict.fromkeys(reports, later_ms))
    ingress = Membership(w.link, namespace)
    await ingress.join_as_ingress(an_ingress)
    await ingress.leave()
    assert ingress.members.workers == (WorkerLease("worker-0", 4),)
    assert ingress.members.engines == (EngineReport("worker-2", 96, 32, model="m"),)


# -- what was written ----------------------------------------------------------------------------


async def answers(
    w: World, request_id: str, state: State, reason: Reason | None, text: bytes = b"id: 1\n\n"
) -> None:
    """A worker writes this and ends the request, and its queue entry is gone."""
    attempt, _ = await (await w.writer()).open(request_id, 1, b"nonce-1", OPENED)
    attempt.append([], [text], 1, HEAD, Usage(output=42))
    attempt.stop(state, reason, SUMMARY_OF_42, 1 if state is State.COMPLETED else None)
    await attempt.closed


async def test_a_journal_says_how_much_was_written(w: World) -> None:
    for request_id in ("req_1", "req_expired", "req_waits", "req_cancelled", "req_broken_off"):
        await w.admit(request_id)
    entries = await w.queue().claim(5)
    await answers(w, "req_1", State.COMPLETED, None)
    await answers(w, "req_expired", State.EXPIRED, Reason.DEADLINE)
    await (await w.writer()).open("req_broken_off", 1, b"nonce-2", OPENED)
    for request_id in ("req_cancelled", "req_broken_off"):
        await w.endings.end(request_id, Reason.CANCELLED)
    assert {entry.request_id: await written_in_journal(w.store, entry) for entry in entries} == {
        "req_1": CompletionStats(42),
        "req_cancelled": CompletionStats(0, whole=False, begun=False),
        "req_waits": None,
        "req_broken_off": CompletionStats(0, whole=False),
        "req_expired": CompletionStats(42, whole=False),
    }


async def test_a_large_answer_does_not_pass_over_the_connection_of_the_admissions(w: World) -> None:
    await w.admit()
    (entry,) = await w.queue().claim(1)
    await answers(w, "req_1", State.COMPLETED, None, os.urandom(1 << 20))
    replies, call = [], w.link.call

    async def watched(commands: Sequence[Command], large: bool = False) -> list[Reply]:
        replies.append(await call(commands, large))
        return replies[-1]

    w.link.call = watched  # type: ignore[method-assign]
    assert await written_in_journal(w.store, entry) == CompletionStats(42)
    assert len(repr(replies)) < 1_000
