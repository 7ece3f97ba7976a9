"""A running request gives its place to another one, and continues later: real ingresses, a real
Redis, and the simulated engine, whose text depends on the prompt alone.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest

from serve_app.contract import Cause, Reason, State
from serve_app.errors import Fenced, RedisUnavailable
from serve_app.journal.entries import transcript
from serve_app.journal.ids import yield_id
from serve_app.journal.yielding import Yielding
from serve_app.processes.ingress import IngressProcess
from tests.journal.journal_helpers import World, add, everything, finish, world
from tests.journal.yielding import (
    HOUR_S,
    SLICE,
    YieldingService,
    begun,
    ended,
    has_output,
    is_ended,
    service,
)
from tests.waiting import eventually


async def test_batch_yields_to_realtime_and_its_answer_is_the_unbroken_one(
    redis_url: str, namespace: str
) -> None:
    async with service(redis_url, namespace) as its, its.ingress("ingress-1") as ingress:
        hub = ingress.followers
        its.engine.most = 0
        await its.admit("long", 300, "batch")
        follower = await hub.follow("long", 0)
        reading = asyncio.create_task(everything(follower))
        for number in range(3):
            its.engine.most += 2 * SLICE  # of 300
            await eventually(partial(has_output, its, "long", number + 1))
            await its.admit(f"short-{number}", 5, "realtime")
            await ended(its, f"short-{number}")
            assert not await is_ended(its, "long")
        its.engine.most = math.inf
        await ended(its, "long")
        assert await its.epochs("long") == 4
        whole = await its.text("long")
        await its.admit("again", 300)
        await ended(its, "again")
        assert whole == await its.text("again")
        entries = await its.w.entries("long")
        (last,) = [entry for entry in entries if entry.terminal]
        assert await reading == transcript(last)
        assert its.calls[:5] == [
            ("long", 1),
            ("short-0", 1),
            ("long", 2),
            ("short-1", 1),
            ("long", 3),
        ]


@asynccontextmanager
async def suspended(
    url: str, namespace: str
) -> AsyncIterator[tuple[YieldingService, IngressProcess]]:
    """`long` has yielded to `short`, which goes on until the test allows it more tokens."""
    async with service(url, namespace) as its, its.ingress("ingress-1") as ingress:
        its.engine.most = 2 * SLICE
        await its.admit("long", 300, "batch", HOUR_S / 2)
        await eventually(lambda: has_output(its, "long", 1))
        await its.admit("short", 400, "realtime")
        await eventually(lambda: begun(its, "short"))
        assert (await its.w.entries("long"))[-1].id == yield_id(1)
        assert its.calls == [("long", 1), ("short", 1)]
        yield its, ingress


async def test_a_request_that_waits_for_its_next_turn_can_be_cancelled(
    redis_url: str, namespace: str
) -> None:
    async with suspended(redis_url, namespace) as (its, ingress):
        await its.w.endings.end("long", State.CANCELLED, Reason.CANCELLED)
        its.engine.most = math.inf
        await ended(its, "short")
        await eventually(lambda: not ingress.dispatcher.in_flight)
        assert its.calls == [("long", 1), ("short", 1)], "no engine works on it"
        assert (await its.w.entries("long"))[-1].state is State.CANCELLED


async def test_a_request_that_waits_for_its_next_turn_keeps_its_deadline(
    redis_url: str, namespace: str, later: Callable[[float], None]
) -> None:
    async with suspended(redis_url, namespace) as (its, _):
        later(HOUR_S / 2 + 1)
        await ended(its, "long")
        (last,) = [entry for entry in await its.w.entries("long") if entry.terminal]
        assert (last.state, last.reason) == (State.EXPIRED, Reason.DEADLINE)
        assert not await is_ended(its, "short")
        assert ("long", 2) not in its.calls


async def test_another_ingress_continues_what_has_yielded_when_its_turn_comes(
    redis_url: str, namespace: str
) -> None:
    async with service(redis_url, namespace) as its:
        its.engine.most = 2 * SLICE
        async with its.ingress("ingress-1"):
            await its.admit("long", 200, "batch")
            await eventually(lambda: has_output(its, "long", 1))
            await its.admit("short", 400, "realtime")
            await eventually(lambda: begun(its, "short"))
        async with its.ingress("ingress-2") as ingress:
            await eventually(lambda: ingress.dispatcher.in_flight == 2)
            its.engine.most = math.inf
            await ended(its, "short", "long")
            short, long = [(await its.w.entries(name))[-1] for name in ("short", "long")]
            assert short.summary
            assert long.summary
            assert long.summary.attempt
            assert long.summary.attempt.opened_ms >= short.summary.ended_ms, "taken places"
            assert await its.epochs("long") == 2
            assert len(await its.text("long")) == 200


async def test_an_attempt_that_ends_the_request_at_the_same_moment_does(
    redis_url: str, namespace: str
) -> None:
    async with world(redis_url, namespace) as w:
        await w.admit()
        writer = await w.writer()
        attempt = await w.opened(writer)
        attempt.continuable = True
        add(attempt, 1)
        await eventually(lambda: _accepted(w, 3))
        assert await w.store.end_attempt("req_1", 1) is Yielding.DONE
        finish(attempt)
        await attempt.closed
        assert (await w.entries())[-1].state is State.COMPLETED
        with pytest.raises(Fenced):
            await w.opened(await w.writer(), 2, b"nonce-2")


async def _accepted(w: World, count: int) -> bool:
    return len(await w.entries()) == count


async def test_what_a_worker_produces_after_a_yield_is_no_part_of_the_answer(
    redis_url: str, namespace: str
) -> None:
    async with world(redis_url, namespace) as w:
        await w.admit()
        hub = await w.hub()
        follower = await hub.follow("req_1", 0)
        attempt = await w.opened(await w.writer())
        attempt.continuable = True
        add(attempt, 1)
        await eventually(lambda: _accepted(w, 3))
        assert await w.store.end_attempt("req_1", 1) is Yielding.DONE
        add(attempt, 2)
        with pytest.raises(Fenced):
            await attempt.closed
        entries = await w.entries()
        assert (entries[-1].id, entries[-1].quit) == (yield_id(1), Cause.YIELDED)
        second = await w.opened(await w.writer(), 2, b"nonce-2")
        second.continue_from(entries[2].id, entries[2].body, 1, entries[2].head)
        add(second, 2)
        finish(second)
        body = await everything(follower)
        assert body == b"id: 1\ndata: 1\n\nid: 2\ndata: 2\n\n"
        assert follower.reader.ending is not None
        assert follower.reader.ending.state is State.COMPLETED


@pytest.mark.parametrize(
    ("case", "found"),
    [
        ("nothing written", Yielding.NOT_NOW),
        ("not continuable", Yielding.NEVER),
        ("several generations", Yielding.NEVER),
        ("another attempt", Yielding.NOT_NOW),
        ("yielded", Yielding.NOT_NOW),
        ("ended", Yielding.NOT_NOW),
        ("no attempt", Yielding.NOT_NOW),
    ],
)
async def test_what_cannot_yield_is_left_alone(
    redis_url: str, namespace: str, case: str, found: Yielding
) -> None:
    async with world(redis_url, namespace) as w:
        await w.admit()
        if case != "no attempt":
            attempt = await w.opened(await w.writer())
            attempt.continuable = case != "not continuable"
        if case not in ("no attempt", "nothing written"):
            add(attempt, 1)
            await eventually(lambda: _accepted(w, 3))
        if case == "several generations":
            attempt.append([[-1, "a", [1], None, None, None]], [], 1)
            await eventually(lambda: _accepted(w, 4))
        if case == "another attempt":
            await w.opened(await w.writer(), 2, b"nonce-2")
        if case == "yielded":
            assert await w.store.end_attempt("req_1", 1) is Yielding.DONE
        if case == "ended":
            await w.endings.end("req_1", State.CANCELLED, Reason.CANCELLED)
        before = await w.ids()
        assert await w.store.end_attempt("req_1", 1) is found
        assert await w.ids() == before


async def test_a_request_whose_yield_did_not_reach_redis_goes_on_and_is_told_again(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with service(redis_url, namespace) as its, its.ingress("ingress-1") as ingress:
        store, asked = ingress.base.store, 0
        really = store.end_attempt

        async def unreachable_once(request_id: str, epoch: int) -> Yielding:
            nonlocal asked
            asked += 1
            if asked == 1:
                raise RedisUnavailable("test")
            return await really(request_id, epoch)

        monkeypatch.setattr(store, "end_attempt", unreachable_once)
        its.engine.most = 2 * SLICE
        await its.admit("long", 350, "batch")
        await eventually(lambda: has_output(its, "long", 1))
        await its.admit("short", 5, "realtime")
        await ended(its, "short")
        its.engine.most = math.inf
        await ended(its, "long")
        assert its.calls == [("long", 1), ("short", 1), ("long", 2)]
        assert asked == 2
