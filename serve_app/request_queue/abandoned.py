"""Takes over claims that no ingress works on: those of dead ingresses, and those whose answer was
lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace

from serve_app import timings
from serve_app.errors import RedisUnavailable
from serve_app.redis.keyspace import QUEUE_GROUP
from serve_app.redis.replies import all_answered
from serve_app.request_queue.entry import QueueEntry
from serve_app.request_queue.streams import QueueStreams, text, with_fields

log = logging.getLogger("hermes.dispatcher")


class AbandonedClaims:
    """Finds such claims, and takes them over for one ingress.

    Args:
        may_be_claimed: whether there is any claim to look at.
    """

    def __init__(
        self,
        streams: QueueStreams,
        consumer: str,
        may_be_claimed: Callable[[], bool] = lambda: True,
    ) -> None:
        self._streams = streams
        self._consumer = consumer
        self._may_be_claimed = may_be_claimed

    async def take_over(
        self, alive: Collection[str] | None, known: Collection[QueueEntry]
    ) -> list[QueueEntry]:
        """Claim the entries of ingresses without a lease, and entries that this ingress has claimed
        without knowing.

        The latter are claims whose answer was lost with a connection.

        Args:
            alive: ingresses that may be alive; None if that is unknown, and then only this
                ingress's own entries are claimed.
            known: the entries that this ingress works on.

        Raises:
            RedisUnavailable: Redis cannot be reached.
        """
        taken: list[QueueEntry] = []
        if not self._may_be_claimed():
            return taken
        await self._streams.prepare()
        keys = self._streams.keys
        try:
            summaries = all_answered(
                await self._streams.link.call([("XPENDING", key, QUEUE_GROUP) for key in keys])
            )
        except RedisUnavailable:
            self._streams.forget()
            raise
        for stream, (*_, consumers) in zip(keys, summaries, strict=True):
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
        link, most = self._streams.link, timings.TAKE_OVER_AT_MOST
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
        entries = await self._streams.entries(stream, there)
        return [replace(entry, taken_over=True) for entry in entries]

    async def _acknowledge_deleted(self, stream: str, gone: Collection[str]) -> None:
        """Acknowledge ids that are deleted but pending, or that another ingress has just claimed;
        this harms neither.
        """
        if not gone:
            return
        link = self._streams.link
        held = await link.call([("XRANGE", stream, entry_id, entry_id) for entry_id in gone])
        deleted = [entry_id for entry_id, found in zip(gone, held, strict=True) if found == []]
        if deleted:
            await link.call([("XACK", stream, QUEUE_GROUP, *deleted)])
