"""Measures how long the queues are, and how old their oldest requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.clock import RedisClock
from serve_app.errors import RedisUnavailable
from serve_app.policy.classes import CLASSES
from serve_app.redis.client import redis_call
from serve_app.redis.keyspace import QUEUE_GROUP
from serve_app.redis.memory import Memory
from serve_app.redis.replies import all_answered
from serve_app.request_queue.streams import QueueStreams, text


@dataclass(frozen=True, slots=True)
class Depth:
    """The state of one class's queue. `waiting`: not claimed yet; `oldest_s`: age of the oldest of
    them (0 if there is none).
    """

    waiting: int
    claimed: int
    oldest_s: float


class QueueDepths:
    """Measures the queues of one model."""

    def __init__(self, streams: QueueStreams, clock: RedisClock | None = None) -> None:
        self._streams = streams
        self._clock = clock or RedisClock()

    async def look(self) -> tuple[dict[str, Depth], Memory | None]:
        """Length and oldest age of every class, in two round trips, and Redis's memory if it
        reports it.

        Raises:
            RedisUnavailable: Redis cannot be reached.
        """
        await self._streams.prepare()
        pipeline = self._streams.redis.pipeline(transaction=False)
        for stream in self._streams.keys:
            pipeline.xlen(stream)
            pipeline.xpending(stream, QUEUE_GROUP)
            pipeline.xinfo_groups(stream)
        pipeline.info("memory")
        try:
            *replies, info = await redis_call(lambda: pipeline.execute(raise_on_error=False))
            all_answered(replies)
        except RedisUnavailable:
            self._streams.forget()
            raise
        firsts = await self._first_waiting(replies[2::3])
        depths = {
            name: self._depth(length, pending, first)
            for name, length, pending, first in zip(
                CLASSES, replies[::3], replies[1::3], firsts, strict=True
            )
        }
        return depths, None if isinstance(info, Exception) else Memory.from_info(info)

    async def _first_waiting(self, groups_of_each: Sequence[Any]) -> list[Any]:
        """The oldest unclaimed entry of each queue, as a list of one or none."""
        firsts = self._streams.redis.pipeline(transaction=False)
        for stream, groups in zip(self._streams.keys, groups_of_each, strict=True):
            named = [
                group["last-delivered-id"] for group in groups if text(group["name"]) == QUEUE_GROUP
            ]
            if not named:
                self._streams.forget()
                raise RedisUnavailable(f"Redis: {stream} has no consumer group")
            ms, _, seq = text(named[0]).partition("-")
            firsts.xrange(stream, min=f"{ms}-{int(seq) + 1}", count=1)
        found: list[Any] = await redis_call(lambda: firsts.execute())
        return found

    def _depth(self, length: int, pending: Any, first: Sequence[Any]) -> Depth:
        claimed, age_s = int(pending["pending"]), 0.0
        if first:
            enqueued_ms = int(text(first[0][0]).partition("-")[0])
            age_s = max(0.0, self._clock.now_s() - enqueued_ms / 1000)
        return Depth(max(0, length - claimed), claimed, age_s)
