"""Enqueue, claim, acknowledge, measure. Queue entries may be duplicated and are never trusted alone.

Keys: streams `{ns}:q:<model>:<class>`; consumer group `ingress`; a consumer is an ingress process.
Fields of a queue entry: r request id, t tenant, s session key, d deadline (Unix ms), c cost estimate (tokens), p
`traceparent` (where it is traced).
"""

from __future__ import annotations

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
from serve_app.scheduling.order import CLASSES
from serve_app.storage import Memory

GROUP = "ingress"
_TAKEN_MS = 1_000
_ANSWER_LOST_MS = 8_000
_TAKE_AT_MOST = 1_000
_BLOCK_MS = 1_000  # below redis-py's socket timeout, or an idle queue would look like a dead Redis


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A claimed entry. `entry_id` says when it was enqueued, by Redis's clock."""

    stream: str
    entry_id: str
    request_class: str
    request_id: str
    tenant: str
    session: str
    deadline_ms: int
    cost_tokens: int
    trace: str = ""
    taken_over: bool = False
    """Whether another ingress had claimed it before: somebody may be working on it."""

    @property
    def enqueued_ms(self) -> int:
        """Unix milliseconds."""
        return int(self.entry_id.partition("-")[0])


@dataclass(frozen=True, slots=True)
class Depth:
    """One class's line. `waiting`: not claimed yet; `oldest_s`: age of the first of them (0 if none)."""

    waiting: int
    claimed: int
    oldest_s: float


class RequestQueue:
    """The lines of one model."""

    def __init__(
        self, redis: Redis, link: RedisLink, namespace: str, model: str, consumer: str, clock: RedisClock | None = None
    ) -> None:
        self._redis = redis
        self._link = link
        self._clock = clock or RedisClock()
        self._namespace = namespace
        self._consumer = consumer
        self._streams = {name: f"{namespace}:q:{model}:{name}" for name in CLASSES}
        self._classes = {stream: name for name, stream in self._streams.items()}
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
                    taken += await self._claim_from(stream, name, _ANSWER_LOST_MS, carried)
                elif alive is not None and name not in alive:
                    taken += await self._claim_from(stream, name, _TAKEN_MS, ())
        return taken

    async def _claim_from(self, stream: str, consumer: str, idle_ms: int, but: Collection[str]) -> list[QueueEntry]:
        """Only what has been idle for a while: of two who take over at once, the second finds it just touched."""
        pending: Any = await reaching(
            lambda: self._redis.xpending_range(stream, GROUP, "-", "+", _TAKE_AT_MOST, consumer, idle=idle_ms)
        )
        ids: Any = [_text(item["message_id"]) for item in pending]
        ids = [entry_id for entry_id in ids if entry_id not in but]
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
        return [replace(self._entry(stream, item), taken_over=True) for item in there]

    async def is_ours(self, entry: QueueEntry) -> bool:
        """Whether nobody has taken this claim over.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        found: Any = await reaching(
            lambda: self._redis.xpending_range(entry.stream, GROUP, entry.entry_id, entry.entry_id, 1)
        )
        return bool(found) and _text(found[0]["consumer"]) == self._consumer

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
            last = _text(next(group for group in groups if _text(group["name"]) == GROUP)["last-delivered-id"])
            ms, _, seq = last.partition("-")
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
        return [self._entry(_text(stream), item) for stream, items in raw or [] for item in items]

    def _entry(self, stream: str, item: Any) -> QueueEntry:
        entry_id, fields = item
        return QueueEntry(
            stream=stream,
            entry_id=_text(entry_id),
            request_class=self._classes[stream],
            request_id=_text(fields[b"r"]),
            tenant=_text(fields[b"t"]),
            session=_text(fields[b"s"]),
            deadline_ms=int(fields[b"d"]),
            cost_tokens=int(fields[b"c"]),
            trace=_text(fields.get(b"p", b"")),
        )

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
