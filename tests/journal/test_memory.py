"""Redis memory per journal, as stated in docs/redis.md, and a full Redis."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import pytest

from serve_app.clock import RedisClock
from serve_app.contract import Reason, State
from serve_app.errors import RedisUnavailable
from serve_app.journal.entries import transcript
from serve_app.journal.facts import AttemptFacts, RequestFacts
from serve_app.journal.ids import TERMINAL_ID
from serve_app.observability.metrics import Telemetry
from tests.journal.journal_helpers import (
    PrivateRedis,
    World,
    add,
    added,
    events,
    everything,
    finish,
    world,
)
from tests.waiting import eventually
from workers.recorder import Recorder
from workers.simulated_responses import ResponseFormat

ROOT = Path(__file__).parents[2]
TOKENS = 500
TOLERANCE = 0.3
REQUEST_ID = "req_0123456789abcdef0123456789abcdef"
FULL_BYTES = 8 << 20
ROOM_BYTES = 64 << 20


def documented(row: str) -> int:
    """The number of bytes in a row of the table in docs/redis.md."""
    page = (ROOT / "docs" / "redis.md").read_text()
    (number,) = re.findall(rf"^\| {re.escape(row)} \| ([\d,]+) \|", page, re.MULTILINE)
    return int(number.replace(",", ""))


async def answer(w: World) -> dict[str, float]:
    """A typical request from its admission to its compacted end: one entry for each token. Returns
    bytes, by row.
    """
    now_ms = int(time.time() * 1000)
    names = ("standard", "default", "0123456789abcdef", "hermes-tiny")
    facts = RequestFacts(*names, True, now_ms, now_ms + 600_000, "hermes:w:abcdefgh")
    engine = "vllm-0.32.0"
    opened = AttemptFacts("abcdefgh", engine, now_ms, "", f"{engine} builtin:tiny dtype=float32")
    await w.accept(REQUEST_ID, facts, b"x" * 1000)
    attempt, _ = await (await w.writer()).open(REQUEST_ID, 1, b"12345678", opened)
    recorder = Recorder(attempt, facts, opened, Telemetry(), RedisClock())
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await recorder.send({"type": "http.response.start", "status": 200, "headers": headers})
    shape = ResponseFormat(REQUEST_ID, "hermes-tiny", chat=True, created_s=1_767_225_600)
    text = (ROOT / "scripts" / "tiny-model" / "text" / "stories.txt").read_text().split()
    assert len(text) > TOKENS
    before = await aof_bytes(w)
    for number, word in enumerate(text[:TOKENS], start=1):
        last = number == TOKENS
        recorder.record(0, f"{word} ", (30_000 + 7 * number,), "length" if last else None, None, 0)
        event = shape.chunk(f"{word} ", last)
        assert 200 < len(event) < 260
        await recorder.send({"type": "http.response.body", "body": event, "more_body": True})
        recorder.pulled()
        while attempt.pending:
            await asyncio.sleep(0)
    running = await memory(w)
    assert len(await w.entries(REQUEST_ID)) == TOKENS + 2
    appended = await eventually(lambda: grown(w, before))
    recorder.end(State.COMPLETED, None, w.settings.journal.transcript_compression_level)
    await attempt.closed
    await eventually(lambda: w.compacted(REQUEST_ID))
    return {
        "a token of a running request": running / TOKENS,
        "a finished request of 500 tokens": await memory(w),
        "a token, in the append-only file": appended / TOKENS,
    }


async def memory(w: World) -> int:
    used: int = await w.operator.memory_usage(w.store.key(REQUEST_ID), samples=0)
    return used


async def aof_bytes(w: World) -> int:
    return int((await w.redis.info("persistence"))["aof_current_size"])


async def grown(w: World, before: int) -> int:
    """By how much the append-only file has grown, once everything is written to it."""
    found: dict[str, int] = await w.redis.info("persistence")
    return 0 if found["aof_buffer_length"] else found["aof_current_size"] - before


async def test_a_journal_takes_the_memory_that_the_document_states(
    private_redis: PrivateRedis, namespace: str
) -> None:
    async with world(private_redis.url, namespace) as w:
        found = await answer(w)
    for row, measured in found.items():
        stated = documented(row)
        assert abs(measured - stated) <= TOLERANCE * stated, (
            f"{row}: {measured:.0f} bytes, documented as {stated}"
        )


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
        for name, state in zip(waiting, (State.CANCELLED, State.EXPIRED), strict=True):
            assert await w.store.end(name, state, Reason.DEADLINE, await w.entries(name))
            assert (await w.ending(name))[0] is state
        with pytest.raises(RedisUnavailable, match="OOM command not allowed"):
            await w.admit("req_2")
        await w.operator.config_set("maxmemory", ROOM_BYTES)
        assert await reading == events(1, 5)
        last = (await w.entries())[-1]
        assert (last.id, transcript(last)) == (TERMINAL_ID, events(1, 5))
        assert await w.admit("req_2") == "req_2"
