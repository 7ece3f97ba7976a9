"""Measures how long the queues are, and how old their oldest requests."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.clock import RedisClock
from serve_app.errors import RedisUnavailable
from serve_app.policy.classes import CLASSES
from serve_app.redis.connection import Command
from serve_app.redis.keyspace import QUEUE_GROUP
from serve_app.redis.memory import Memory, parse_info
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
        self._found: Collection[Depth] | None = None

    @property
    def may_wait(self) -> bool:
        """Whether a request waited at the last look; before the first one, it is not known."""
        return self._found is None or any(one.waiting for one in self._found)

    @property
    def may_be_claimed(self) -> bool:
        """Whether a request was claimed at the last look; before the first one, it is not known."""
        return self._found is None or any(one.claimed for one in self._found)

    async def look(self) -> tuple[dict[str, Depth], Memory | None]:
        """Length and oldest age of every class, and Redis's memory if it reports it, in one round
        trip, and one more if anything waits.

        Raises:
            RedisUnavailable: Redis cannot be reached.
        """
        await self._streams.prepare()
        asked: list[Command] = []
        for stream in self._streams.keys:
            asked += [("XLEN", stream), ("XPENDING", stream, QUEUE_GROUP)]
        try:
            *replies, info = await self._streams.link.call([*asked, ("INFO", "memory")])
            all_answered(replies)
        except RedisUnavailable:
            self._streams.forget()
            raise
        lengths, claims = replies[::2], replies[1::2]
        ages_s = await self._oldest_s(lengths, claims)
        depths = {
            name: Depth(max(0, length - claimed), claimed, age_s)
            for name, length, (claimed, *_), age_s in zip(
                CLASSES, lengths, claims, ages_s, strict=True
            )
        }
        self._found = depths.values()
        return depths, Memory.from_info(parse_info(info)) if isinstance(info, bytes) else None

    async def _oldest_s(self, lengths: Sequence[int], claims: Sequence[Any]) -> list[float]:
        """The age of the oldest unclaimed entry of each queue. Entries leave their queue when they
        are acknowledged, so the first one behind the last that is claimed was never claimed.
        """
        firsts: dict[int, Command] = {}
        for number, (claimed, _, last, _) in enumerate(claims):
            if lengths[number] > claimed:
                after = f"({text(last or b'0')}"
                firsts[number] = ("XRANGE", self._streams.keys[number], after, "+", "COUNT", 1)
        ages_s = [0.0] * len(claims)
        if firsts:
            found = all_answered(await self._streams.link.call(list(firsts.values())))
            for number, first in zip(firsts, found, strict=True):
                ages_s[number] = self._age_s(first)
        return ages_s

    def _age_s(self, first: Sequence[Any]) -> float:
        if not first:
            return 0.0
        enqueued_ms = int(text(first[0][0]).partition("-")[0])
        return max(0.0, self._clock.now_s() - enqueued_ms / 1000)
