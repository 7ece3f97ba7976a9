"""Enqueue, claim, acknowledge, measure. Queue entries may be duplicated and are never trusted alone.

Keys: streams `{ns}:q:<model>:<class>`; consumer group `ingress`; a consumer is an ingress process.
Fields of a queue entry: r request id, t tenant, s session key, d deadline (Unix ms), c cost estimate (tokens), p
`traceparent` (where it is traced).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from serve_app.errors import JournalUnavailable
from serve_app.journal.bodies import body_key
from serve_app.journal.client import reaching
from serve_app.journal.connection import RedisLink
from serve_app.redis_clock import RedisClock
from serve_app.request_queue.dead_letters import DeadLetters
from serve_app.request_queue.entry import QueueEntry, decode_entry
from serve_app.scheduling.order import CLASSES
from serve_app.storage import Memory

log = logging.getLogger("hermes.dispatcher")

GROUP = "ingress"
_TAKEN_MS = 1_000
_ANSWER_LOST_MS = 8_000
_TAKE_AT_MOST = 1_000
_BLOCK_MS = 1_000  # below redis-py's socket timeout, or an idle queue would look like a dead Redis


@dataclass(frozen=True, slots=True)
class Depth:
    """One class's line. `waiting`: not claimed yet; `oldest_s`: age of the first of them (0 if none)."""

    waiting: int
    claimed: int
    oldest_s: float


class RequestQueue:
    """The lines of one model."""

    def __init__(
        self,
        redis: Redis,
        link: RedisLink,
        namespace: str,
        model: str,
        consumer: str,
        clock: RedisClock | None = None,
        dead: DeadLetters | None = None,
    ) -> None:
        self._redis = redis
        self._link = link
        self._clock = clock or RedisClock()
        self._namespace = namespace
        self._consumer = consumer
        self._streams = {name: f"{namespace}:q:{model}:{name}" for name in CLASSES}
        self._classes = {stream: name for name, stream in self._streams.items()}
        self._dead = dead or DeadLetters(link, namespace, keep=100)
        self._prepared = False

    def stream(self, request_class: str) -> str:
        """Redis key of a class's line."""
        return self._streams[request_class]

    @staticmethod
    def fields(
        request_id: str, tenant: str, session: str, deadline_ms: int, cost_tokens: int, trace: str = ""
    ) -> dict[str, Any]:
        """What `claim` gives back."""
        fields = {"r": request_id, "t": tenant, "s": session, "d": deadline_ms, "c": cost_tokens}
        return {**fields, "p": trace} if trace else fields

    async def claim(self, room: int) -> list[QueueEntry]:
        """Claim up to about `room` entries, urgent classes first; wait a second for the first one.

        One blocking read covers all classes, so that an arrival costs one round trip. It takes at most a share of
        the room from each class; where the room is too small to share, the classes are asked in order.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        await self._prepare()
        share = room // len(CLASSES)
        if share == 0:
            for name in CLASSES:
                found = await self._read([self._streams[name]], room, block_ms=None)
                if found:
                    return found
        return await self._read(list(self._streams.values()), max(1, share), block_ms=_BLOCK_MS)

    async def take_over(self, alive: Collection[str] | None, carried: Collection[str]) -> list[QueueEntry]:
        """Claim what ingresses without a lease have claimed, and what this one has without knowing.

        The latter are claims whose answer was lost with a connection.

        Args:
            alive: ingresses that may be alive; None where that is not known, and only one's own are claimed.
            carried: ids of the entries that this ingress works on.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        await self._prepare()
        taken: list[QueueEntry] = []
        pipeline = self._redis.pipeline(transaction=False)
        for stream in self._streams.values():
            pipeline.xpending(stream, GROUP)
        try:
            summaries = await reaching(lambda: pipeline.execute())
        except JournalUnavailable:
            self._prepared = False  # perhaps Redis came back empty
            raise
        for stream, summary in zip(self._streams.values(), summaries, strict=True):
            for consumer in summary["consumers"]:
                name = _text(consumer["name"])
                if name == self._consumer:
                    lost = await self._claim_from(stream, name, _ANSWER_LOST_MS, carried)
                    if lost:
                        log.warning("queue: %d claims whose answer was lost are taken up", len(lost))
                    taken += lost
                elif alive is not None and name not in alive:
                    taken += await self._claim_from(stream, name, _TAKEN_MS, ())
        return taken

    async def _claim_from(self, stream: str, consumer: str, idle_ms: int, but: Collection[str]) -> list[QueueEntry]:
        """Only what has been idle for a while: of two who take over at once, the second finds it just touched."""
        ids: Any = []
        start: str | None = "-"
        while start and not ids:  # a page may hold nothing but what is carried
            pending: Any = await reaching(
                lambda start=start: self._redis.xpending_range(  # type: ignore[misc]
                    stream, GROUP, start, "+", _TAKE_AT_MOST, consumer, idle=idle_ms
                )
            )
            found = [_text(item["message_id"]) for item in pending]
            ids = [entry_id for entry_id in found if entry_id not in but]
            start = f"({found[-1]}" if len(found) == _TAKE_AT_MOST else None
        if not ids:
            return []
        claimed: Any = await reaching(lambda: self._redis.xclaim(stream, GROUP, self._consumer, idle_ms, ids))
        there = [item for item in claimed if item[1] is not None]
        gone = set(ids) - {_text(item[0]) for item in there}
        if gone:  # deleted but still pending, or just claimed by another ingress: acknowledging harms neither
            held = await self._link.call([("XRANGE", stream, entry_id, entry_id) for entry_id in gone])
            deleted = [entry_id for entry_id, found in zip(gone, held, strict=True) if found == []]
            if deleted:
                await self._link.call([("XACK", stream, GROUP, *deleted)])
        return [replace(entry, taken_over=True) for entry in await self._entries(stream, there)]

    async def are_ours(self, entries: Sequence[QueueEntry]) -> list[bool]:
        """Whether nobody has taken these claims over: of many, in one round trip.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        replies = await self._link.call(
            [("XPENDING", entry.stream, GROUP, entry.entry_id, entry.entry_id, "1") for entry in entries]
        )
        for reply in replies:
            if isinstance(reply, Exception):
                raise JournalUnavailable(f"Redis: {reply}")
        return [bool(found) and _text(found[0][1]) == self._consumer for found in replies]

    async def acknowledge(self, entry: QueueEntry) -> None:
        """The terminal entry has been read: the queue forgets the request, and its body goes, whatever its end was.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        # Deleted first: what is still pending then, whoever takes over mends; the other way round it counts for ever.
        await self._link.call(
            [
                ("XDEL", entry.stream, entry.entry_id),
                ("XACK", entry.stream, GROUP, entry.entry_id),
                ("UNLINK", body_key(self._namespace, entry.request_id)),
            ]
        )

    async def look(self) -> tuple[dict[str, Depth], Memory | None]:
        """Length and oldest age of every class, in two round trips; and Redis's memory, unless it refuses to say.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        await self._prepare()
        pipeline = self._redis.pipeline(transaction=False)
        for stream in self._streams.values():
            pipeline.xlen(stream)
            pipeline.xpending(stream, GROUP)
            pipeline.xinfo_groups(stream)
        pipeline.info("memory")
        try:
            *replies, info = await reaching(lambda: pipeline.execute(raise_on_error=False))
            if failed := next((reply for reply in replies if isinstance(reply, Exception)), None):
                raise JournalUnavailable(f"Redis: {failed}")
        except JournalUnavailable:
            self._prepared = False  # perhaps Redis came back empty
            raise
        firsts = self._redis.pipeline(transaction=False)
        for stream, groups in zip(self._streams.values(), replies[2::3], strict=True):
            named = [group["last-delivered-id"] for group in groups if _text(group["name"]) == GROUP]
            if not named:
                self._prepared = False
                raise JournalUnavailable(f"Redis: {stream} has no consumer group")
            ms, _, seq = _text(named[0]).partition("-")
            firsts.xrange(stream, min=f"{ms}-{int(seq) + 1}", count=1)
        first_entries = await reaching(lambda: firsts.execute())
        depths = {}
        for index, name in enumerate(CLASSES):
            length, pending = replies[3 * index], int(replies[3 * index + 1]["pending"])
            first = first_entries[index]
            age_s = max(0.0, self._clock.now_s() - int(_text(first[0][0]).partition("-")[0]) / 1000) if first else 0.0
            depths[name] = Depth(max(0, length - pending), pending, age_s)
        return depths, None if isinstance(info, Exception) else Memory.from_info(info)

    async def depths(self) -> dict[str, Depth]:
        """`look`, less the memory.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        return (await self.look())[0]

    async def _read(self, streams: Sequence[str], count: int, block_ms: int | None) -> list[QueueEntry]:
        wanted: Any = dict.fromkeys(streams, ">")
        try:
            raw: Any = await reaching(
                lambda: _passing(self._redis.xreadgroup(GROUP, self._consumer, wanted, count=count, block=block_ms))
            )
        except _NoGroup:  # Redis came back empty: make the groups again
            self._prepared = False
            return []
        return [entry for stream, items in raw or [] for entry in await self._entries(_text(stream), items)]

    async def _entries(self, stream: str, items: Sequence[Any]) -> list[QueueEntry]:
        """What can be read of claimed items. What cannot becomes a dead letter: it must not hide the others."""
        entries = []
        for entry_id, fields in items:
            try:
                entries.append(decode_entry(stream, self._classes[stream], entry_id, fields))
            except (LookupError, ValueError) as error:
                log.error("queue: an entry of %s that cannot be read becomes a dead letter: %r", stream, error)
                try:
                    await self._dead.add_unreadable(f"{stream} {_text(entry_id)}", fields)
                    await self._link.call([("XDEL", stream, entry_id), ("XACK", stream, GROUP, entry_id)])
                except JournalUnavailable as unavailable:  # it stays claimed, and is found again
                    log.warning("queue: it could not be kept yet: %s", unavailable)
        return entries

    async def bury(self, entry: QueueEntry) -> None:
        """Keep an entry, whose journal cannot be read, as a dead letter. The queue has it until it is acknowledged.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        found: Any = await reaching(lambda: self._redis.xrange(entry.stream, entry.entry_id, entry.entry_id))
        for entry_id, fields in found:
            await self._dead.add_unreadable(f"{entry.stream} {_text(entry_id)}", fields)

    async def _prepare(self) -> None:
        if self._prepared:
            return
        for stream in self._streams.values():
            await reaching(lambda stream=stream: self._create_group(stream))  # type: ignore[misc]
        self._prepared = True

    async def _create_group(self, stream: str) -> None:
        try:
            await self._redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise


class _NoGroup(Exception):
    """The stream or its consumer group is gone."""


async def _passing(call: Any) -> Any:
    try:
        return await call
    except ResponseError as error:
        if str(error).startswith("NOGROUP"):
            raise _NoGroup from None
        raise


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
