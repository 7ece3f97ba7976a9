"""Scripts are sent as their digests. A Redis that has forgotten one gets it again, before anything
that depends on it, and executes it once.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from serve_app import timings
from serve_app.journal.ledger import sums
from tests.journal.cable import UNANSWERED, UNSENT, Cable
from tests.journal.journal_helpers import (
    OPENED,
    PrivateRedis,
    World,
    add,
    complete,
    events,
    everything,
    finish,
    world,
)

MANY = 6


class Forgetful(Cable):
    """Redis forgets all scripts right before each that is sent as a digest."""

    w: World
    forgotten = 0

    async def _ask(self, command: Any, *where: Any) -> bytes:
        if command[0] == b"EVALSHA":
            self.forgotten += 1
            await self.w.operator.script_flush()
        return await super()._ask(command, *where)


async def run(w: World, name: str, writer: Any) -> None:
    """Accept a request, answer it with three events, and end it."""
    await w.admit(name)
    attempt, _ = await writer.open(name, 1, b"nonce", OPENED)
    add(attempt, 1)
    add(attempt, 2, 3)
    await complete(attempt)


async def check_ended_once(w: World, requests: int) -> None:
    """Each request is booked once, and no queue entry is left."""
    this_hour = int(time.time() * 1000) // timings.HOUR_MS
    namespace, hours = w.settings.namespace, (range(1), range(this_hour - 1, this_hour + 1))
    booked = [page for some in hours for page in await sums(w.link, namespace, some, str)]
    assert sum(row.requests for page in booked for row in page.values()) == requests
    depth = (await w.depths())["standard"]
    assert (depth.waiting, depth.claimed) == (0, 0)


async def test_scripts_that_are_forgotten_in_mid_flush_are_executed_once(
    w: World, namespace: str
) -> None:
    """Among the appends and ends of other requests."""
    async with Forgetful(w.settings.redis.url) as way, world(way.url, namespace) as its:
        way.w = w
        writer, hub = await its.writer(), await w.hub()
        for turn in range(3):
            names = [f"req_{turn}_{number}" for number in range(MANY)]
            reads = [asyncio.create_task(everything(hub.follow_new(name))) for name in names]
            await asyncio.gather(*(run(its, name, writer) for name in names))
            assert await asyncio.gather(*reads) == [events(1, 3)] * MANY
        assert way.forgotten > 4 * MANY, "all but the first of each kind, on each connection"
        await check_ended_once(w, 3 * MANY)


@pytest.mark.parametrize("how", [UNSENT, UNANSWERED])
async def test_a_redis_that_starts_again_in_mid_flush_executes_the_end_once(
    private_redis: PrivateRedis, namespace: str, how: str
) -> None:
    async with (
        Cable(private_redis.url) as way,
        world(way.url, namespace) as its,
        world(private_redis.url, namespace) as w,
    ):
        writer = await its.writer()
        await run(its, "req_0", writer)  # from now on both scripts go as digests
        await its.admit()
        attempt = await its.opened(writer)
        add(attempt, 1)
        way.cut("EVALSHA", how)
        finish(attempt)
        while not way.cuts:
            await asyncio.sleep(0)
        private_redis.kill()
        await private_redis.start()
        await attempt.closed
        assert await its.ending() == ("completed", "")
        await check_ended_once(w, 2)
