"""The queue of requests. Its entries may be duplicated, and the journal always overrides them.

Keys: streams `{ns}:q:<model>:<class>`, one for each class, with the consumer group `QUEUE_GROUP`.
Anybody may have written to Redis: an entry that does not fit the schema is refused where it is
decoded, and becomes a dead letter.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from serve_app import timings
from serve_app.clock import RedisClock
from serve_app.errors import RedisUnavailable, Unreadable, decoding
from serve_app.journal.entries import EntryId
from serve_app.policy.classes import CLASSES
from serve_app.policy.work import Work
from serve_app.redis.connection import Command
from serve_app.redis.keyspace import QUEUE_GROUP, queue_key
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import Memory, all_answered, answered, parse_info, with_fields
from serve_app.requests.dead_letters import DeadLetters

log = logging.getLogger("hermes.dispatcher")

_LONGEST_NAME = 256
_LONGEST_NUMBER = 18
_LONGEST_KIND = 64


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A claimed entry, whose `entry_id` contains the time of enqueueing, by Redis's clock.

    Its fields in Redis:

        r  request id
        t  tenant
        s  session key
        d  deadline, Unix ms
        c  cost estimate, tokens, and its parts:
        i  prompt
        o  the most that it may write; 0: no limit was given
        k  kind (`Work`)
        n  sequences (`Work`), if there are several
        p  `traceparent`, if it is traced
    """

    stream: str
    entry_id: str
    request_class: str
    request_id: str
    tenant: str
    session: str
    deadline_ms: int
    cost_tokens: int
    trace: str = ""
    prompt_tokens: int = 0
    """An estimate."""
    max_output_tokens: int = 0
    """0 if the client gave no limit."""
    kind: str = ""
    sequences: int = 1
    taken_over: bool = False
    """Whether another ingress had claimed it earlier, and may be working on it."""

    @property
    def key(self) -> tuple[str, str]:
        """Unique over all queues: two streams may produce the same `entry_id`."""
        return self.stream, self.entry_id

    @property
    def accepted_ms(self) -> int:
        """Unix milliseconds."""
        return int(self.entry_id.partition("-")[0])


def encode_entry(
    request_id: str,
    tenant: str,
    session: str,
    deadline_ms: int,
    work: Work,
    trace: str = "",
) -> dict[str, Any]:
    """The fields of an entry, as `XADD` takes them."""
    fields = {"r": request_id, "t": tenant, "s": session, "d": deadline_ms, "c": work.cost_tokens}
    fields |= {"i": work.prompt_tokens, "o": work.max_output_tokens, "k": work.kind}
    if work.sequences > 1:
        fields["n"] = work.sequences
    return {**fields, "p": trace} if trace else fields


def decode_request_id(fields: Mapping[bytes, bytes]) -> str:
    """The request id alone; empty if this is no entry of ours."""
    return fields.get(b"r", b"").decode(errors="replace")


@decoding
def decode_entry(
    stream: str, request_class: str, entry_id: bytes, fields: Mapping[bytes, bytes]
) -> QueueEntry:
    """Decode an item of a class's queue.

    Raises:
        Unreadable: it is not one of ours.
    """
    trace = fields.get(b"p", b"")
    return QueueEntry(
        stream=stream,
        entry_id=entry_id.decode(),
        request_class=request_class,
        request_id=_named(fields[b"r"]),
        tenant=fields[b"t"].decode(),
        session=fields[b"s"].decode(),
        deadline_ms=_number(fields[b"d"]),
        cost_tokens=_number(fields[b"c"]),
        trace=trace.decode() if len(trace) <= _LONGEST_NAME else "",
        prompt_tokens=_number(fields[b"i"]),
        max_output_tokens=_number(fields[b"o"]),
        kind=fields[b"k"][:_LONGEST_KIND].decode(errors="replace"),
        sequences=max(1, _number(fields.get(b"n", b"1"))),
    )


def _named(value: bytes) -> str:
    if not 0 < len(value) <= _LONGEST_NAME:
        raise ValueError(f"a name of {len(value)} bytes")
    return value.decode()


def _number(value: bytes) -> int:
    number = int(value[:_LONGEST_NUMBER])
    if len(value) > _LONGEST_NUMBER or number < 0:
        raise ValueError(f"no number of ours: {value[:40]!r}")
    return number


class RequestQueue:
    """The queues of one model, as one consumer uses them. What asks Redis raises
    `RedisUnavailable` if it cannot be reached.

    Args:
        consumer: the ingress that claims; empty if nothing is claimed.
    """

    def __init__(
        self, link: RedisLink, namespace: str, model: str, dead: DeadLetters, consumer: str
    ) -> None:
        self.link = link
        self._by_class = {name: queue_key(namespace, model, name) for name in CLASSES}
        self._classes = {stream: name for name, stream in self._by_class.items()}
        self._dead = dead
        self._consumer = consumer
        self._prepared = False

    @property
    def keys(self) -> list[str]:
        """Redis keys of the streams, the most urgent class first."""
        return list(self._by_class.values())

    async def prepare(self) -> None:
        """Create the consumer groups, unless it is known that they exist."""
        if self._prepared:
            return
        create = [("XGROUP", "CREATE", key, QUEUE_GROUP, "0", "MKSTREAM") for key in self.keys]
        for reply in await self.link.call(create):
            if not str(reply).startswith("BUSYGROUP"):  # it exists already
                answered(reply)
        self._prepared = True

    def forget(self) -> None:
        """Create the groups again before the next use, because Redis may have come back empty."""
        self._prepared = False

    async def claim(
        self,
        of_each: int,
        classes: Sequence[str] = CLASSES,
        wait: bool = True,
    ) -> list[QueueEntry]:
        """Claim up to `of_each` entries of each class, oldest first, in one round trip.

        Args:
            wait: if there is nothing, wait a second for the first arrival.
        """
        await self.prepare()
        streams = [self._by_class[name] for name in classes]
        block = ("BLOCK", timings.CLAIM_BLOCK_MS) if wait else ()
        wanted = ("COUNT", of_each, *block, "STREAMS", *streams, *(">" for _ in streams))
        reply = await self.link.wait(("XREADGROUP", "GROUP", QUEUE_GROUP, self._consumer, *wanted))
        if isinstance(reply, Exception) and str(reply).startswith("NOGROUP"):
            self.forget()  # Redis came back empty: create the groups again
            return []
        return [
            entry
            for stream, items in answered(reply) or ()
            for entry in await self._entries(text(stream), map(with_fields, items))
        ]

    async def is_ours(self, entry: QueueEntry) -> bool:
        """Whether nobody has taken this claim over."""
        asked = ("XPENDING", entry.stream, QUEUE_GROUP, entry.entry_id, entry.entry_id, "1")
        (found,) = all_answered(await self.link.call([asked]))
        return bool(found) and text(found[0][1]) == self._consumer

    async def acknowledge(self, entry: QueueEntry) -> None:
        """Delete a request's entry, after the terminal entry has been read."""
        await self.link.call(deletion(entry.stream, entry.entry_id))

    async def bury(self, entry: QueueEntry) -> None:
        """Keep an entry whose journal cannot be decoded as a dead letter. The queue keeps it until
        it is acknowledged.
        """
        (found,) = await self.link.call([("XRANGE", entry.stream, entry.entry_id, entry.entry_id)])
        for entry_id, fields in map(with_fields, answered(found)):
            await self._dead.add_unreadable(f"{entry.stream} {text(entry_id)}", fields)

    async def take_over(
        self, alive: Collection[str] | None, known: Collection[QueueEntry]
    ) -> list[QueueEntry]:
        """Claim the entries of ingresses without a lease, and those that this ingress has claimed
        without knowing, because the answer was lost.

        Args:
            alive: ingresses that may be alive; None if that is unknown: then none but our own.
            known: the entries that this ingress works on.
        """
        taken: list[QueueEntry] = []
        await self.prepare()
        try:
            summaries = all_answered(
                await self.link.call([("XPENDING", key, QUEUE_GROUP) for key in self.keys])
            )
        except RedisUnavailable:
            self.forget()
            raise
        for stream, (*_, consumers) in zip(self.keys, summaries, strict=True):
            for consumer, _ in consumers or ():
                name = text(consumer)
                if name == self._consumer:
                    ids = {entry.entry_id for entry in known if entry.stream == stream}
                    lost = await self._claim_from(stream, name, timings.CLAIM_ANSWER_LOST_MS, ids)
                    if lost:
                        log.warning("queue: taking up %d claims whose answer was lost", len(lost))
                    taken += lost
                elif alive is not None and name not in alive:
                    taken += await self._claim_from(stream, name, timings.TAKE_OVER_IDLE_MS, ())
        return taken

    async def _claim_from(
        self, stream: str, consumer: str, idle_ms: int, but: Collection[str]
    ) -> list[QueueEntry]:
        """Claim only entries that have been idle for a while: if two ingresses take over at the
        same time, the second finds them just touched.
        """
        link, most = self.link, timings.TAKE_OVER_AT_MOST
        ids: list[str] = []
        start: str | None = "-"
        while start and not ids:  # a page may contain only entries that this ingress works on
            page = ("XPENDING", stream, QUEUE_GROUP, "IDLE", idle_ms, start, "+", most, consumer)
            (pending,) = all_answered(await link.call([page]))
            found = [text(entry_id) for entry_id, *_ in pending]
            ids = [entry_id for entry_id in found if entry_id not in but]
            start = f"({found[-1]}" if len(found) == most else None
        if not ids:
            return []
        claim = ("XCLAIM", stream, QUEUE_GROUP, self._consumer, idle_ms, *ids)
        (claimed,) = all_answered(await link.call([claim]))
        there = [with_fields(item) for item in claimed if item and item[1] is not None]
        await self._acknowledge_deleted(stream, set(ids) - {text(item[0]) for item in there})
        entries = await self._entries(stream, there)
        return [replace(entry, taken_over=True) for entry in entries]

    async def _acknowledge_deleted(self, stream: str, gone: Collection[str]) -> None:
        """Acknowledge ids that are deleted but pending, or that another ingress has just claimed;
        this harms neither.
        """
        if not gone:
            return
        held = await self.link.call([("XRANGE", stream, entry_id, entry_id) for entry_id in gone])
        deleted = [entry_id for entry_id, found in zip(gone, held, strict=True) if found == []]
        if deleted:
            await self.link.call([("XACK", stream, QUEUE_GROUP, *deleted)])

    async def _entries(self, stream: str, items: Iterable[Any]) -> list[QueueEntry]:
        """The claimed items that can be decoded. Each other item becomes a dead letter, so that it
        does not hide the rest.
        """
        entries = []
        for entry_id, fields in items:
            try:
                entries.append(decode_entry(stream, self._classes[stream], entry_id, fields))
            except Unreadable as error:
                log.error(
                    "queue: an entry of %s that cannot be read becomes a dead letter: %r",
                    stream,
                    error,
                )
                await self._replace(stream, entry_id, fields)
        return entries

    async def _replace(self, stream: str, entry_id: bytes, fields: Any) -> None:
        """Keep a dead letter in place of the entry."""
        try:
            await self._dead.add_unreadable(f"{stream} {text(entry_id)}", fields)
            await self.link.call(deletion(stream, text(entry_id)))
        except RedisUnavailable as error:  # it remains claimed, and will be found again
            log.warning("queue: cannot keep the dead letter yet: %s", error)


@dataclass(frozen=True, slots=True)
class Depth:
    """The state of one class's queue. `waiting`: not claimed yet; `oldest_s`: age of the oldest of
    them (0 if there is none).
    """

    waiting: int
    claimed: int
    oldest_s: float


class QueueDepths:
    """Measures the queues of one model. What asks Redis raises `RedisUnavailable` if it cannot be
    reached.
    """

    def __init__(self, queue: RequestQueue, clock: RedisClock | None = None) -> None:
        self._queue = queue
        self._link = queue.link
        self._clock = clock or RedisClock()
        self._found: Collection[Depth] | None = None

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


def deletion(stream: str, entry_id: str) -> list[Command]:
    """The commands that delete a queue entry and its claim.

    It is deleted first: an entry that then remains pending is repaired by a take-over. In the other
    order it would count forever.
    """
    return [("XDEL", stream, entry_id), ("XACK", stream, QUEUE_GROUP, entry_id)]


def text(value: bytes) -> str:
    return value.decode()
