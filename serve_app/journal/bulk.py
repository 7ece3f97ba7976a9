"""Reads long journals in pages, a few at a time, over a connection that nothing else uses."""

from __future__ import annotations

import asyncio

from serve_app import timings
from serve_app.clock import RedisClock
from serve_app.journal.entries import Entry
from serve_app.journal.ids import EntryId
from serve_app.journal.store import JournalStore
from serve_app.redis.link import RedisLink
from serve_app.settings import Settings


class BulkReads:
    """The potentially long reads of one ingress."""

    def __init__(self, settings: Settings) -> None:
        self._link = RedisLink(settings.redis)
        self._store = JournalStore(settings, self._link, RedisClock())
        self._few = asyncio.Semaphore(settings.ingress.max_bulk_reads)

    async def page(self, request_id: str, after: EntryId) -> list[Entry] | None:
        """The next entries after `after`; None if there is no such journal (any more).

        Raises:
            RedisUnavailable: Redis cannot be reached.
        """
        async with self._few:
            (entries,) = await self._store.read_many([(request_id, after)], timings.PAGE_ENTRIES)
            return entries

    async def close(self) -> None:
        """Close the connection."""
        await self._link.close()
