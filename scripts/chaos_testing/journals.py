"""What Redis says of the requests, besides what clients see: whether every accepted one makes
progress, and whether the ledger, the journals and the clients say the same of every one that has
ended, and of every token.

A request makes progress when its journal has a new entry, or no longer exists. A request without
progress for 15 s, while Redis answered and accepted writes, is a finding, unless the reason is
known: it has not been claimed, and no engine has capacity.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from scripts.chaos_testing.traffic import Told
from serve_app import timings
from serve_app.contract import FINAL
from serve_app.journal.entries import entry_from_redis
from serve_app.journal.ledger import Row
from serve_app.journal.usage import Usage
from serve_app.policy.classes import CLASSES
from serve_app.redis.keyspace import journal_key, queue_key, usage_key, workers_key

WITHIN_S = 15.0
_LOOK_S = 1.0
_ANSWER_S = 1.5
_ENDED_WITHIN_S = 60.0
_MOST = 2_000
_AT_ONCE = 500
_GROUP = "ingress"
_LAST = str(2**64 - 1)
"""The sequence number of the entry that ends a request."""


@dataclass
class Watchdog:
    """Checks once a second. `findings`: which requests stalled, and their state in Redis;
    `longest_s`: the longest stall of all.
    """

    redis: Redis
    model: str
    namespace: str = "hermes"
    within_s: float = WITHIN_S
    findings: dict[str, str] = field(default_factory=dict)
    longest_s: float = 0.0
    _seen: dict[str, tuple[tuple[str, str], float]] = field(default_factory=dict)
    """What a request's state was, and how long it has been so, without the time in which it could
    not move.
    """

    async def watch(self) -> None:
        looked_s = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            with suppress(RedisError, OSError, TimeoutError):  # then no progress was possible
                async with asyncio.timeout(_ANSWER_S):
                    found, room = await self._look()
                self._note(found, room, time.monotonic() - looked_s)
            looked_s = time.monotonic()

    def _note(self, found: dict[str, tuple[str, str]], room: int, passed_s: float) -> None:
        """Process one reading: last journal id and claiming ingress of each request, and how many
        more the engines can take.
        """
        before, self._seen = self._seen, {}
        for name, (last, owner) in found.items():
            state, still_s = before.get(name, (None, 0.0))
            may_stand = last.endswith(_LAST) or (not owner and room <= 0)
            still_s = 0.0 if may_stand or state != (last, owner) else still_s + passed_s
            self._seen[name] = (last, owner), still_s
            self.longest_s = max(self.longest_s, still_s)
            if still_s > self.within_s:
                where = f"claimed by {owner}" if owner else "in its line, though there is room"
                self.findings[name] = f"no movement for {still_s:.0f} s: last entry {last}, {where}"

    async def _look(self) -> tuple[dict[str, tuple[str, str]], int]:
        streams = [queue_key(self.namespace, self.model, name) for name in CLASSES]
        lines = await _together(
            self.redis, lambda p: [p.xrange(stream, count=_MOST) for stream in streams]
        )
        pending = await _together(
            self.redis,
            lambda p: [p.xpending_range(stream, _GROUP, "-", "+", _MOST) for stream in streams],
        )
        owners = {
            (stream, item["message_id"]): item["consumer"].decode()
            for stream, items in zip(streams, pending, strict=True)
            for item in items
            if isinstance(item, dict)
        }
        requests = {
            fields[b"r"].decode(): owners.get((stream, entry_id), "")
            for stream, entries in zip(streams, lines, strict=True)
            for entry_id, fields in entries or ()
            if fields.get(b"r", b"").startswith(b"req_")
        }
        tails = await _tails(self.redis, [journal_key(self.namespace, one) for one in requests])
        workers: list[bytes] = await self.redis.zrangebyscore(  # type: ignore[assignment]
            workers_key(self.namespace), time.time() * 1000, "+inf"
        )
        places = [int(n) for worker in workers if (n := worker.rpartition(b"|")[2]).isdigit()]
        found = {
            request_id: (tail[0][0].decode() if tail else "", owner)
            for (request_id, owner), tail in zip(requests.items(), tails, strict=True)
            if tail or owner
        }
        return found, sum(places) - len(owners)


async def _together(redis: Any, ask: Callable[[Any], object]) -> list[Any]:
    """The answers to all that is asked, in one write."""
    pipeline = redis.pipeline(transaction=False)
    ask(pipeline)
    return await pipeline.execute() if len(pipeline) else []


async def _tails(redis: Any, keys: Sequence[object]) -> list[Any]:
    """The last entry of each of these journals, in a list."""
    return await _together(redis, lambda p: [p.xrevrange(key, count=1) for key in keys])


async def differences(redis: Any, all_told: Sequence[Told], namespace: str = "hermes") -> list[str]:
    """A sentence for each difference, once all requests have ended."""
    until_s = time.monotonic() + _ENDED_WITHIN_S
    while True:
        journals, open_ones = await _journals(redis, namespace)
        if not open_ones or time.monotonic() > until_s:
            break
        await asyncio.sleep(timings.HEALTH_LOOK_S)
    found = [f"{name} has not ended" for name in open_ones]
    booked = await _ledger(redis, namespace)
    found += [
        f"{name}: {booked[name]} in the ledger, {journals[name]} in the journals"
        for name in sorted({*booked, *journals})
        if booked[name] != journals[name]
    ]
    return found + [
        f"{told.request_id}: {used['output_tokens']} tokens booked, {told.tokens} received"
        for told in all_told
        if told.done and (used := told.state.get("usage"))
        if used["output_tokens"] != told.tokens
    ]


async def _journals(redis: Any, namespace: str) -> tuple[Counter[str], list[str]]:
    """The sums over all journals that have ended, and the names of the others."""
    found, open_ones = Counter[str](), list[str]()
    keys = [key async for key in redis.scan_iter(journal_key(namespace, "*"), count=1_000)]
    for at in range(0, len(keys), _AT_ONCE):
        some = keys[at : at + _AT_ONCE]
        for key, tail in zip(some, await _tails(redis, some), strict=True):
            last = entry_from_redis(tail[0]) if tail else None
            if last is None or last.state is None:
                open_ones.append(key.decode().rpartition(":")[2])
            else:
                found[last.state] += 1
                found.update(_tokens(Usage.decode(last.used)))
    return found, open_ones


async def _ledger(redis: Any, namespace: str) -> Counter[str]:
    found = Counter[str]()
    async for key in redis.scan_iter(usage_key(namespace, 0).removesuffix("0") + "*"):
        for value in (await redis.hgetall(key)).values():
            row = Row.decode(value)
            found.update(dict(zip(FINAL, row.states, strict=True)))
            found.update(_tokens(row.usage))
    return found


def _tokens(usage: Usage) -> dict[str, int]:
    return {f"{name} tokens": count for name, count in usage._asdict().items()}
