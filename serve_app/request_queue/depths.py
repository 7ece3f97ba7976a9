"""Looks at what waits in the queues: how much and for how long, and whose deadlines have passed.
While no engine has capacity, nobody else notices these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from serve_app import timings
from serve_app.clock import RedisClock
from serve_app.errors import RedisUnavailable
from serve_app.journal.ids import BEGINNING, EntryId
from serve_app.policy.classes import CLASSES
from serve_app.redis.connection import Command
from serve_app.redis.keyspace import QUEUE_GROUP
from serve_app.redis.replies import Memory, all_answered, parse_info
from serve_app.request_queue.entry import decode_deadline
from serve_app.request_queue.queue import RequestQueue, deletion, text, with_fields


@dataclass(frozen=True, slots=True)
class Depth:
    """The state of one class's queue. `waiting`: not claimed yet; `oldest_s`: age of the oldest of
    them (0 if there is none).
    """

    waiting: int
    claimed: int
    oldest_s: float


class Overdue(NamedTuple):
    """A queue entry that nobody has claimed in time."""

    stream: str
    entry_id: str
    request_id: str


class QueueDepths:
    """Measures the queues of one model, and finds and deletes overdue entries. What asks Redis
    raises `RedisUnavailable` if it cannot be reached.
    """

    def __init__(self, queue: RequestQueue, clock: RedisClock | None = None) -> None:
        self._queue = queue
        self._link = queue.link
        self._clock = clock or RedisClock()
        self._found: Collection[Depth] | None = None
        self._looked_to = dict.fromkeys(queue.keys, BEGINNING)

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
        """
        await self._queue.prepare()
        asked: list[Command] = []
        for stream in self._queue.keys:
            asked += [("XLEN", stream), ("XPENDING", stream, QUEUE_GROUP)]
        try:
            *replies, info = await self._link.call([*asked, ("INFO", "memory")])
            all_answered(replies)
        except RedisUnavailable:
            self._queue.forget()
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
        """The age of the oldest unclaimed entry of each queue: of the first behind the last that is
        claimed, since entries leave their queue when they are acknowledged.
        """
        firsts: dict[int, Command] = {}
        for number, (claimed, _, last, _) in enumerate(claims):
            if lengths[number] > claimed:
                after = f"({text(last or b'0')}"
                firsts[number] = ("XRANGE", self._queue.keys[number], after, "+", "COUNT", 1)
        ages_s = [0.0] * len(claims)
        found = all_answered(await self._link.call(list(firsts.values()))) if firsts else ()
        for number, first in zip(firsts, found, strict=True):
            if first:
                age_s = self._clock.now_s() - EntryId.parse(first[0][0]).epoch / 1000
                ages_s[number] = max(0.0, age_s)
        return ages_s

    async def overdue(self, now_ms: int) -> list[Overdue]:
        """The requests in the next part of every queue whose deadline is before `now_ms`. Each call
        continues where the one before stopped, so a long queue costs no more than a short one.
        """
        if not self.may_wait:
            return []
        streams = self._queue.keys
        claimed = await self._link.call([("XINFO", "GROUPS", stream) for stream in streams])
        parts: list[Command] = []
        for stream, found in zip(streams, claimed, strict=True):
            ms, seq = max(self._looked_to[stream], _last_claimed(found))
            parts.append(
                ("XRANGE", stream, f"{ms}-{seq + 1}", "+", "COUNT", timings.OVERDUE_A_LOOK)
            )
        late: list[Overdue] = []
        looked = all_answered(await self._link.call(parts))
        for stream, items in zip(streams, looked, strict=True):
            self._looked_to[stream] = (
                EntryId.parse(items[-1][0]) if len(items) == timings.OVERDUE_A_LOOK else BEGINNING
            )
            late += _late(stream, items, now_ms)
        return late

    async def remove(self, entry: Overdue) -> None:
        """Delete an entry whose request has ended, whoever has claimed it meanwhile."""
        await self._link.call(deletion(entry.stream, entry.entry_id))


def _last_claimed(groups: Any) -> EntryId:
    """The last claimed id of a queue's group; none if the queue does not exist yet."""
    if isinstance(groups, Exception):
        return BEGINNING
    facts = (dict(zip(group[::2], group[1::2], strict=True)) for group in groups)
    return max((EntryId.parse(one[b"last-delivered-id"]) for one in facts), default=BEGINNING)


def _late(stream: str, items: Any, now_ms: int) -> Iterator[Overdue]:
    for entry_id, fields in map(with_fields, items):
        # The ingress that claims an entry handles it if it cannot be decoded.
        found = decode_deadline(fields)
        if found is not None and found[1] <= now_ms:
            yield Overdue(stream, entry_id.decode(), found[0])
