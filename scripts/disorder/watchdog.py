"""Whether everything that was accepted moves: the journals themselves are watched, not what clients see of them.

A request has moved when its journal has a new entry, or none any more. One that has not for 15 s, while Redis answered
and took writes, is a finding, unless it is known what it waits for: it has not been claimed, and no engine has room.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

WITHIN_S = 15.0
_LOOK_S = 1.0
_ANSWER_S = 1.5
_GROUP = "ingress"
_LAST = str(2**64 - 1)
"""The number of what ends a request."""
_CLASSES = ("realtime", "standard", "batch")


@dataclass
class Movement:
    """What was seen of one request. `still_s`: how long it has not moved, less the time in which it could not."""

    last: str
    still_s: float = 0.0


@dataclass
class Watchdog:
    """Looks once a second. `findings`: who stood still, and how it was known to Redis; `longest_s`: of all."""

    redis: Redis
    model: str
    namespace: str = "hermes"
    within_s: float = WITHIN_S
    findings: dict[str, str] = field(default_factory=dict)
    longest_s: float = 0.0
    _seen: dict[str, Movement] = field(default_factory=dict)

    async def watch(self) -> None:
        """For ever."""
        looked_s = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                async with asyncio.timeout(_ANSWER_S):
                    waiting, claimed, room = await self._look()
            except (RedisError, OSError, TimeoutError):
                looked_s = time.monotonic()  # nothing could move
                continue
            now_s = time.monotonic()
            self.seen(waiting, claimed, room, now_s - looked_s)
            looked_s = now_s

    def seen(self, waiting: dict[str, str], claimed: dict[str, tuple[str, str]], room: int, passed_s: float) -> None:
        """Take one look in.

        Args:
            waiting: last journal id of what nobody has claimed, by request.
            claimed: of what somebody has: the last journal id, and who.
            room: requests that the engines can take beyond what is claimed.
            passed_s: since the look before.
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
                self.findings[name] = f"no movement for {movement.still_s:.0f} s: last entry {last}, {where}"

    async def _look(self) -> tuple[dict[str, str], dict[str, tuple[str, str]], int]:
        streams = [f"{self.namespace}:q:{self.model}:{name}" for name in _CLASSES]
        found = await self._ask(lambda p: [p.xrange(stream, count=2_000) for stream in streams])
        pending = await self._ask(lambda p: [p.xpending_range(stream, _GROUP, "-", "+", 2_000) for stream in streams])
        owners = {(stream, item["message_id"]): item["consumer"].decode()
                  for stream, items in zip(streams, pending, strict=True)
                  for item in items if isinstance(item, dict)}  # fmt: skip
        lines = [(stream, entry_id, fields[b"r"].decode()) for stream, entries in zip(streams, found, strict=True)
                 for entry_id, fields in entries or () if fields.get(b"r", b"").startswith(b"req_")]  # fmt: skip
        journals = await self._ask(
            lambda p: [p.xrevrange(f"{self.namespace}:j:{request_id}", count=1) for *_, request_id in lines]
        )
        workers = await self.redis.zrangebyscore(f"{self.namespace}:workers", time.time() * 1000, "+inf")
        room = sum(int(rest) for worker in workers if (rest := worker.rpartition(b"|")[2]).isdigit()) - len(owners)
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
