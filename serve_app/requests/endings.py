"""Ends requests from outside of a worker's attempt.

A cancel, a passed deadline or an attempt that cannot be repeated ends a request through `Endings`.
It writes the terminal entry, and then counts and logs the end, once per request; if Redis's answer
is lost, it does neither. If a worker ends a request itself, its attempt writes the ending
(`workers/attempt.py`).
"""

from __future__ import annotations

import logging

from serve_app.contract import Reason, State
from serve_app.journal.entries import Entry
from serve_app.journal.facts import RequestFacts
from serve_app.journal.store import JournalStore
from serve_app.journal.usage import Whose
from serve_app.observability.logs import about
from serve_app.observability.metrics import Telemetry
from serve_app.request_queue.entry import QueueEntry

log = logging.getLogger("hermes.endings")


class Endings:
    """Ends requests, and tells the metrics and the log."""

    def __init__(self, store: JournalStore, telemetry: Telemetry) -> None:
        self._store = store
        self._telemetry = telemetry

    async def end(
        self, request_id: str, state: State, reason: Reason, outline: list[Entry] | None = None
    ) -> bool:
        """End a request, unless it has ended or is gone.

        Args:
            outline: of its journal, if the caller has read it; this saves a round trip.

        Returns:
            Whether this call ended it.

        Raises:
            RedisUnavailable: Redis cannot be reached, or it is unknown whether the request ended.
        """
        entries = outline or await self._store.outline(request_id)
        summary = await self._store.end(request_id, state, reason, entries) if entries else None
        if summary is None:
            return False
        facts = summary.request
        assert facts is not None, "an outline begins with the request, unless it has ended"
        self._tell(request_id, state, reason, facts)
        return True

    async def end_unreadable(self, entry: QueueEntry, state: State, reason: Reason) -> bool:
        """End a request whose journal cannot be decoded; its queue entry says whose it is.

        Returns and raises as `end`.
        """
        row = Whose(entry.tenant, "", entry.request_class, self._store.model)
        if await self._store.end(entry.request_id, state, reason, [], row) is None:
            return False
        self._tell(entry.request_id, state, reason, entry)
        return True

    def _tell(
        self, request_id: str, state: State, reason: Reason, whose: RequestFacts | QueueEntry
    ) -> None:
        self._telemetry.ended(whose.request_class, state, reason)
        log.info(
            "request %s ended: %s (%s)",
            request_id,
            state,
            reason,
            extra=about(request_id, whose.tenant, reason, whose.trace),
        )
