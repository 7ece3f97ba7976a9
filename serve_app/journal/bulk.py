"""Long reads of journals: in pages, few at a time, and not over the connection that everybody shares."""

from __future__ import annotations

import asyncio

from serve_app.journal.connection import RedisLink
from serve_app.journal.entries import Entry, EntryId
from serve_app.journal.store import JournalStore
from serve_app.redis_clock import RedisClock
from serve_app.settings import Settings

PAGE_ENTRIES = 256
"""Of a journal, at a time; what comes behind is read when these have been taken."""


class BulkReads:
    """Reads of one ingress whose answers may be long."""

    def __init__(self, settings: Settings) -> None:
        self._link = RedisLink(settings.redis)
        self._store = JournalStore(settings, self._link, RedisClock())
        self._few = asyncio.Semaphore(settings.ingress.max_bulk_reads)

    async def page(self, request_id: str, after: EntryId) -> list[Entry] | None:
        """The next entries behind `after`; None if there is no such journal (any more).

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        async with self._few:
            (entries,) = await self._store.read_many([(request_id, after)], PAGE_ENTRIES)
            return entries

    async def close(self) -> None:
        """Let go of the connection."""
        await self._link.close()
