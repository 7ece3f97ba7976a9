"""Enqueues, claims and acknowledges. Queue entries may be duplicated, and the journal always
overrides them.

The fields of an entry: r request id, t tenant, s session key, d deadline (Unix ms), c cost estimate
(tokens), and its parts: i prompt, o the most that it may write (0: no limit was given),
k kind (see `Work`), p `traceparent` (if it is traced).
"""

from __future__ import annotations

from collections.abc import Sequence

from serve_app import timings
from serve_app.journal.facts import RequestFacts
from serve_app.policy.classes import CLASSES
from serve_app.policy.work import Work
from serve_app.redis.connection import Command
from serve_app.redis.keyspace import QUEUE_GROUP
from serve_app.redis.replies import all_answered, answered
from serve_app.request_queue.entry import QueueEntry, encode_entry
from serve_app.request_queue.streams import QueueStreams, deletion, text, with_fields


class RequestQueue:
    """The queues of one model, as one consumer uses them. What asks Redis raises
    `RedisUnavailable` if it cannot be reached.
    """

    def __init__(self, streams: QueueStreams, consumer: str) -> None:
        self._streams = streams
        self._link = streams.link
        self._consumer = consumer

    def enqueueing(self, request_id: str, facts: RequestFacts, work: Work) -> Command:
        """The command that adds a request to its class's queue. Send it in one transaction with the
        journal's first entry.
        """
        fields = encode_entry(
            request_id, facts.tenant, facts.session, facts.deadline_ms, work, facts.trace
        )
        flat = [part for pair in fields.items() for part in pair]
        return ("XADD", self._streams.by_class[facts.request_class], "*", *flat)

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
        await self._streams.prepare()
        streams = [self._streams.by_class[name] for name in classes]
        return await self._read(streams, of_each, timings.CLAIM_BLOCK_MS if wait else None)

    async def are_ours(self, entries: Sequence[QueueEntry]) -> list[bool]:
        """Whether nobody has taken these claims over; checks many in one round trip."""
        replies = await self._link.call(
            [
                ("XPENDING", entry.stream, QUEUE_GROUP, entry.entry_id, entry.entry_id, "1")
                for entry in entries
            ]
        )
        return [
            bool(found) and text(found[0][1]) == self._consumer for found in all_answered(replies)
        ]

    async def acknowledge(self, entry: QueueEntry) -> None:
        """Delete a request's entry, after the terminal entry has been read."""
        await self._link.call(deletion(entry.stream, entry.entry_id))

    async def _read(
        self, streams: Sequence[str], count: int, block_ms: int | None
    ) -> list[QueueEntry]:
        block = () if block_ms is None else ("BLOCK", block_ms)
        wanted = ("COUNT", count, *block, "STREAMS", *streams, *(">" for _ in streams))
        reply = await self._link.wait(("XREADGROUP", "GROUP", QUEUE_GROUP, self._consumer, *wanted))
        if isinstance(reply, Exception) and str(reply).startswith("NOGROUP"):
            self._streams.forget()  # Redis came back empty: create the groups again
            return []
        return [
            entry
            for stream, items in answered(reply) or ()
            for entry in await self._streams.entries(text(stream), map(with_fields, items))
        ]

    async def bury(self, entry: QueueEntry) -> None:
        """Keep an entry whose journal cannot be decoded as a dead letter. The queue keeps it until
        it is acknowledged.
        """
        (found,) = await self._link.call([("XRANGE", entry.stream, entry.entry_id, entry.entry_id)])
        for entry_id, fields in map(with_fields, answered(found)):
            await self._streams.dead.add_unreadable(f"{entry.stream} {text(entry_id)}", fields)
