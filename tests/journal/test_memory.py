"""A full Redis refuses new requests and takes every end."""

from __future__ import annotations

import asyncio
import os

import pytest

from serve_app import timings
from serve_app.contract import Reason, State
from serve_app.errors import REASONS, RedisUnavailable
from serve_app.journal.entries import TERMINAL_ID
from tests.journal.journal_helpers import (
    HEAD,
    OPENED,
    SUMMARY,
    PrivateRedis,
    add,
    added,
    events,
    everything,
    finish,
    world,
)
from tests.transcripts import transcript
from tests.waiting import eventually

FULL_BYTES = 8 << 20
ROOM_BYTES = 64 << 20


async def test_a_full_redis_refuses_new_requests_and_takes_every_end(
    private_redis: PrivateRedis, namespace: str
) -> None:
    async with world(private_redis.url, namespace) as w:
        hub = await w.hub()
        waiting = [await w.admit(f"req_waits_{number}") for number in range(2)]
        follower = hub.follow_new(await w.admit())
        reading = asyncio.create_task(everything(follower))
        writer = await w.writer()
        attempt = await w.opened(writer)
        await added(attempt, 1)
        assert (await w.operator.config_get("maxmemory-policy"))["maxmemory-policy"] == "noeviction"
        await w.operator.config_set("maxmemory", FULL_BYTES)
        await w.operator.setrange("filler", 2 * FULL_BYTES, "x")
        with pytest.raises(RedisUnavailable, match="OOM command not allowed"):
            await w.admit("req_2")
        assert not await w.redis.exists(w.store.key("req_2"))
        for number in range(2, 6):
            add(attempt, number)
            await eventually(lambda: writer._refusals > 3)
        assert await w.ids() == ["0-1", "1-0", "1-1"], "what a request writes waits"
        finish(attempt)
        await attempt.closed
        for name, reason in zip(waiting, (Reason.CANCELLED, Reason.DEADLINE), strict=True):
            assert await w.endings.end(name, reason)
            assert (await w.ending(name))[0] is REASONS[reason].state
        with pytest.raises(RedisUnavailable, match="OOM command not allowed"):
            await w.admit("req_2")
        await w.operator.config_set("maxmemory", ROOM_BYTES)
        assert await reading == events(1, 5)
        last = (await w.entries())[-1]
        assert (last.id, transcript(last)) == (TERMINAL_ID, events(1, 5))
        assert await w.admit("req_2") == "req_2"


async def test_no_entry_is_larger_than_a_redis_can_be_told_to_take(
    private_redis: PrivateRedis, namespace: str
) -> None:
    for name in ("proto-max-bulk-len", "client-query-buffer-limit"):
        private_redis.run("CONFIG", "SET", name, "1mb")  # it takes no smaller number
    async with world(private_redis.url, namespace) as w:
        writer = await w.writer()
        for number, pieces in enumerate([[timings.ENTRY_BYTES] * 2, [timings.ENTRY_BYTES - 500]]):
            await w.admit(name := f"req_{number}")
            attempt, _ = await writer.open(name, 1, b"nonce", OPENED)
            attempt.append([], [os.urandom(size) for size in pieces], 0, HEAD)
            await eventually(lambda: not attempt.pending)  # noqa: B023
            attempt.stop(State.COMPLETED, None, SUMMARY, 1)
            await attempt.closed
            compacted = await w.compacted(name)
            assert compacted == (number == 1), "its transcript is as large as one can be"
