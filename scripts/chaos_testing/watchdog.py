"""Checks whether every accepted request makes progress, by the journals and not by what clients
see.

A request makes progress when its journal has a new entry, or no longer exists. A request without
progress for 15 s, while Redis answered and accepted writes, is a finding, unless the reason is
known: it has not been claimed, and no engine has capacity.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from serve_app.policy.classes import CLASSES
from serve_app.redis.keyspace import journal_key, queue_key, workers_key

WITHIN_S = 15.0
_LOOK_S = 1.0
_ANSWER_S = 1.5
_MOST = 2_000
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
        lines = await self._ask(lambda p: [p.xrange(stream, count=_MOST) for stream in streams])
        pending = await self._ask(
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
        journals = [journal_key(self.namespace, request_id) for request_id in requests]
        tails = await self._ask(lambda p: [p.xrevrange(key, count=1) for key in journals])
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

    async def _ask(self, ask: Callable[[Any], object]) -> list[Any]:
        pipeline = self.redis.pipeline(transaction=False)
        ask(pipeline)
        return await pipeline.execute() if len(pipeline) else []
