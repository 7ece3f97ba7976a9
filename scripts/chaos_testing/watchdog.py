"""Checks whether every accepted request makes progress, by the journals and not by what clients
see.

A request makes progress when its journal has a new entry, or no longer exists. A request without
progress for 15 s, while Redis answered and accepted writes, is a finding, unless the reason is
known: it has not been claimed, and no engine has capacity.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from serve_app.redis.keyspace import journal_key, queue_key, workers_key

WITHIN_S = 15.0
_LOOK_S = 1.0
_ANSWER_S = 1.5
_GROUP = "ingress"
_LAST = str(2**64 - 1)
"""The sequence number of the entry that ends a request."""
_CLASSES = ("realtime", "standard", "batch")


@dataclass
class Movement:
    """What was seen of one request. `still_s`: how long it has made no progress, without the time
    in which it could not.
    """

    last: str
    still_s: float = 0.0


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
    _seen: dict[str, Movement] = field(default_factory=dict)

    async def watch(self) -> None:
        """Check forever."""
        looked_s = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                async with asyncio.timeout(_ANSWER_S):
                    waiting, claimed, room = await self._look()
            except (RedisError, OSError, TimeoutError):
                looked_s = time.monotonic()  # no progress was possible
                continue
            now_s = time.monotonic()
            self.seen(waiting, claimed, room, now_s - looked_s)
            looked_s = now_s

    def seen(
        self,
        waiting: dict[str, str],
        claimed: dict[str, tuple[str, str]],
        room: int,
        passed_s: float,
    ) -> None:
        """Process one reading.

        Args:
            waiting: last journal id of each unclaimed request.
            claimed: of each claimed request, the last journal id and the claiming ingress.
            room: how many more requests the engines can take beyond the claimed ones.
            passed_s: time since the previous reading.
        """
        now = {name: (last, "") for name, last in waiting.items()} | claimed
        for name in self._seen.keys() - now.keys():
            del self._seen[name]
        for name, (last, owner) in now.items():
            movement = self._seen.setdefault(name, Movement(f"{last} {owner}"))
            ended = last.endswith(_LAST)
            if movement.last != f"{last} {owner}" or ended or (not owner and room <= 0):
                movement.last, movement.still_s = f"{last} {owner}", 0.0
                continue
            movement.still_s += passed_s
            self.longest_s = max(self.longest_s, movement.still_s)
            if movement.still_s > self.within_s:
                where = f"claimed by {owner}" if owner else "in its line, though there is room"
                self.findings[name] = (
                    f"no movement for {movement.still_s:.0f} s: last entry {last}, {where}"
                )

    async def _look(self) -> tuple[dict[str, str], dict[str, tuple[str, str]], int]:
        streams = [queue_key(self.namespace, self.model, name) for name in _CLASSES]
        found = await self._ask(lambda p: [p.xrange(stream, count=2_000) for stream in streams])
        pending = await self._ask(
            lambda p: [p.xpending_range(stream, _GROUP, "-", "+", 2_000) for stream in streams]
        )
        owners = {
            (stream, item["message_id"]): item["consumer"].decode()
            for stream, items in zip(streams, pending, strict=True)
            for item in items
            if isinstance(item, dict)
        }
        lines = [
            (stream, entry_id, fields[b"r"].decode())
            for stream, entries in zip(streams, found, strict=True)
            for entry_id, fields in entries or ()
            if fields.get(b"r", b"").startswith(b"req_")
        ]
        journals = await self._ask(
            lambda p: [
                p.xrevrange(journal_key(self.namespace, request_id), count=1)
                for *_, request_id in lines
            ]
        )
        workers: list[bytes] = await self.redis.zrangebyscore(  # type: ignore[assignment]
            workers_key(self.namespace), time.time() * 1000, "+inf"
        )
        room = sum(
            int(rest) for worker in workers if (rest := worker.rpartition(b"|")[2]).isdigit()
        ) - len(owners)
        waiting: dict[str, str] = {}
        claimed: dict[str, tuple[str, str]] = {}
        for (stream, entry_id, request_id), tail in zip(lines, journals, strict=True):
            last = tail[0][0].decode() if tail else ""
            owner = owners.get((stream, entry_id), "")
            if owner:
                claimed[request_id] = (last, owner)
            elif last:
                waiting[request_id] = last
        return waiting, claimed, room

    async def _ask(self, ask: Any) -> list[Any]:
        pipeline = self.redis.pipeline(transaction=False)
        ask(pipeline)
        return await pipeline.execute() if len(pipeline) else []
