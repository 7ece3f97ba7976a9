"""No accepted request waits forever: what ingresses do for requests that no ingress works on."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from serve_app import timings
from serve_app.errors import RedisUnavailable
from serve_app.policy.work import Work
from serve_app.processes import IngressProcess
from serve_app.redis.keyspace import QUEUE_GROUP
from serve_app.request_queue import QueueEntry, encode_entry
from tests.journal.cable import UNANSWERED, UNSENT, Cable
from tests.journal.ingresses import ended, serving
from tests.journal.journal_helpers import FACTS, OPENED, World, world
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "CLAIM_ANSWER_LOST_MS", 500)
    monkeypatch.setattr(timings, "TAKE_OVER_IDLE_MS", 100)
    monkeypatch.setattr(timings, "TAKE_OVER_S", 0.05)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was claimed a moment ago may be taken over."""
    monkeypatch.setattr(timings, "CLAIM_ANSWER_LOST_MS", 0)
    monkeypatch.setattr(timings, "TAKE_OVER_IDLE_MS", 0)


async def test_a_claim_whose_answer_was_lost_is_taken_up_even_if_leases_are_not_trusted(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ingress that was stopped in the middle of a claim drops the connection that holds the
    answer.
    """
    monkeypatch.setattr(timings, "LEASE_QUICK_S", -1.0)  # no look is ever quick
    monkeypatch.setattr(timings, "LEASE_PATIENCE_S", 1e9)
    await w.admit("req_lost")
    await w.queue("ingress-1").claim(1)  # and nobody has read the answer
    async with serving(w) as (_, ingress):
        await eventually(lambda: ended(w, "req_lost"))
        assert not ingress.membership.members.trusted


async def test_lost_claims_behind_many_that_are_carried_are_found(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "TAKE_OVER_AT_MOST", 2)
    monkeypatch.setattr(timings, "CLAIM_ANSWER_LOST_MS", 0)
    mine = w.queue("ingress-1")
    for number in range(5):
        await w.admit(f"req_{number}")
    *carried, lost = [(await mine.claim(1))[0] for _ in range(5)]
    (found,) = await w.queue("ingress-1").take_over(None, carried)
    assert found.request_id == lost.request_id


async def test_what_another_has_claimed_is_taken_over_only_if_it_is_known_to_be_dead(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "TAKE_OVER_IDLE_MS", 0)
    await w.admit("req_1")
    its = w.queue("ingress-2")
    (claimed,) = await its.claim(1)
    for alive in (None, ["ingress-2"]):
        assert await w.queue("ingress-1").take_over(alive, []) == []
    assert await its.is_ours(claimed)
    (taken,) = await w.queue("ingress-1").take_over([], [])
    assert taken.entry_id == claimed.entry_id
    assert not await its.is_ours(claimed)
    assert await w.queue("ingress-1").is_ours(taken)


async def claimed(w: World, consumer: str, many: int = 3) -> list[QueueEntry]:
    """Requests that an ingress has claimed, before it dies."""
    for number in range(many):
        await w.admit(f"req_{number}")
    return await w.queue(consumer).claim(many)


async def pending(w: World) -> int:
    found = await w.redis.xpending(w.stream("standard"), QUEUE_GROUP)
    return int(found["pending"])


@pytest.mark.parametrize("how", [UNSENT, UNANSWERED])
async def test_a_take_over_that_is_cut_is_completed_by_the_next(
    w: World, namespace: str, at_once: None, how: str
) -> None:
    dead = await claimed(w, "ingress-2")
    async with Cable(w.settings.redis.url) as cable, world(cable.url, namespace) as its:
        cable.cut("XCLAIM", how)
        with pytest.raises(RedisUnavailable):
            await its.queue().take_over([], [])
        taken = await its.queue().take_over([], [])
    assert [entry.entry_id for entry in taken] == [entry.entry_id for entry in dead]
    assert all(entry.taken_over for entry in taken)


async def test_clients_that_read_much_hold_up_no_take_over(w: World, at_once: None) -> None:
    dead = await claimed(w, "ingress-2")
    while not w.link._idle.empty():  # each connection for what is large serves one of them
        w.link._idle.get_nowait()
    taken = await w.queue("ingress-1").take_over([], [])
    assert [entry.entry_id for entry in taken] == [entry.entry_id for entry in dead]


async def test_of_two_that_take_over_at_once_one_has_each_entry(w: World, at_once: None) -> None:
    await claimed(w, "ingress-2")
    names = ("ingress-1", "ingress-3")
    taken = await asyncio.gather(*(w.queue(name).take_over(names, []) for name in names))
    ours = [
        await w.queue(name).is_ours(one)
        for name, its in zip(names, taken, strict=True)
        for one in its
    ]
    assert sum(ours) == await pending(w) == 3


@pytest.mark.parametrize(("word", "how"), [("XDEL", UNANSWERED), ("XACK", UNSENT)])
async def test_an_acknowledgement_that_is_cut_leaves_nothing_that_comes_back(
    w: World, namespace: str, at_once: None, word: str, how: str
) -> None:
    entry, *others = await claimed(w, "ingress-1")
    async with Cable(w.settings.redis.url) as cable, world(cable.url, namespace) as its:
        cable.cut(word, how)
        with pytest.raises(RedisUnavailable):
            await its.queue().acknowledge(entry)
    assert await w.redis.xlen(entry.stream) == 2
    taken = await w.queue("ingress-2").take_over([], [])
    assert [one.entry_id for one in taken] == [one.entry_id for one in others]
    assert await pending(w) == 2


async def test_claims_of_a_dead_ingress_are_taken_over_by_one_whose_loop_always_lags(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "LEASE_PATIENCE_S", 3.0)
    monkeypatch.setattr(timings, "LEASE_QUICK_S", 0.005)
    await w.admit("req_1")
    await w.queue("ingress-2").claim(1)  # which has no lease

    async def lag() -> None:
        while True:
            time.sleep(0.02)  # noqa: ASYNC251  # a busy machine; a look takes a few such steps
            await asyncio.sleep(0.001)

    async with serving(w):
        lagging = asyncio.create_task(lag())
        await eventually(lambda: ended(w, "req_1"))
        lagging.cancel()


async def test_a_call_that_no_worker_opens_is_sent_again(
    w: World, monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    """As one that waits for ever in a router, or whose answer was lost: the journal says that
    nobody has begun.
    """
    monkeypatch.setattr(timings, "CALL_OPENS_S", 0.5)  # of the first call
    monkeypatch.setattr(timings, "REPLICA_AVOID_S", 600.0)
    monkeypatch.setattr(timings, "WAITING_TELL_S", 0.05)
    async with serving(w) as (worker, ingress):
        replicas, avoided = ingress._replicas, list[set[str]]()

        def opens(request_id: str, epoch: int) -> bool:
            monkeypatch.setattr(timings, "CALL_OPENS_S", 600.0)
            avoided.append(set(replicas._avoided))
            return len(worker.calls) > 1

        worker.opens = opens
        await w.admit("req_1")
        await eventually(lambda: ended(w, "req_1"))
        assert worker.calls == [("req_1", 1), ("req_1", 1)]
        assert avoided == [set(), {OPENED.replica}], "the second call goes elsewhere, if it can"
        assert ingress.dispatcher._attempts.stalls.longer_than(0, math.inf) == []
    assert re.search(r"req_1 has waited for \d+ s: opening", logged.text)


MANY = 2_000


@asynccontextmanager
async def many_adopted(w: World) -> AsyncIterator[IngressProcess]:
    """An ingress that has taken over `MANY` requests of another one, all of which run."""
    stream = w.stream("standard")
    deadline_ms = int(time.time() * 1000) + 600_000
    facts = msgspec.structs.replace(FACTS, deadline_ms=deadline_ms)
    pipeline = w.redis.pipeline(transaction=False)
    for number in range(MANY):
        key = w.store.key(f"req_{number}")
        pipeline.xadd(stream, {**encode_entry(f"req_{number}", "t", "s", deadline_ms, Work(7))})
        pipeline.xadd(key, {"m": msgspec.json.encode(facts)}, id="0-1")
        pipeline.xadd(key, {"n": b"n", "m": msgspec.json.encode(OPENED)}, id="1-0")
        pipeline.xadd(key, {"n": b"n", "b": b"id: 1\n\n", "e": b"1"}, id="1-1")
    await pipeline.execute()
    await w.queue().prepare()
    await w.redis.xreadgroup("ingress", "ingress-2", {stream: ">"}, count=MANY)
    async with serving(w) as (_, ingress):
        await eventually(lambda: ingress.dispatcher.in_flight == MANY)
        yield ingress


async def test_two_thousand_adopted_requests_leave_membership_trusted_and_the_ingress_ready(
    w: World,
) -> None:
    async with many_adopted(w) as ingress:
        # A machine that is busy otherwise trusts its looks later.
        await eventually(
            lambda: ingress.membership.members.trusted and ingress.readiness.report()[0]
        )
