"""Ends requests from outside of a worker's attempt: a cancel, a passed deadline, an attempt that
cannot be repeated.

An end is counted and logged once, by whoever has ended the request; if Redis's answer is lost, by
nobody. If a worker ends a request itself, its attempt writes the end (`workers/attempt.py`).
"""

from __future__ import annotations

import logging
import secrets

from serve_app.contract import Reason
from serve_app.errors import REASONS, Unreadable
from serve_app.journal.entries import Entry, RequestFacts, Summary
from serve_app.journal.ledger import Whose
from serve_app.observability.logs import about
from serve_app.observability.metrics import Telemetry
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import answered, is_id_taken
from serve_app.request_queue import QueueEntry
from serve_app.requests.lifecycle import Ended, end
from serve_app.requests.record import Record
from serve_app.requests.store import JournalStore
from serve_app.settings import Settings

log = logging.getLogger("hermes.endings")


class Endings:
    """Ends requests, and tells the metrics and the log. What ends one raises `RedisUnavailable` if
    Redis cannot be reached, or it is unknown whether the request ended.
    """

    def __init__(
        self, settings: Settings, link: RedisLink, store: JournalStore, telemetry: Telemetry
    ) -> None:
        self._settings = settings
        self._link = link
        self.store = store
        self._telemetry = telemetry

    async def end(self, request_id: str, reason: Reason, record: Record | None = None) -> bool:
        """End a request, unless it has ended or is gone. Returns whether this call ended it.

        Args:
            record: what is known of it, if the caller has read it; this saves a round trip.
        """
        record = record or await self.store.record(request_id)
        if record is None or record.ended:
            return False
        facts, summary = record.facts, record.ending(self.store.clock.now_ms())
        if facts is None:
            raise Unreadable(f"the journal of request {request_id} has lost its beginning")
        queued = record.first.queue_entry
        return await self._end(request_id, reason, summary, facts, queued=queued)

    async def end_unreadable(self, entry: QueueEntry) -> bool:
        """The same for a request whose journal cannot be decoded: it ends as `journal_lost`. Its
        queue entry says whose it is.
        """
        summary = Summary(None, None, 0, self.store.clock.now_ms())
        row = Whose(entry.tenant, "", entry.request_class, self._settings.model.name)
        return await self._end(entry.request_id, Reason.JOURNAL_LOST, summary, entry, row)

    async def _end(
        self,
        request_id: str,
        reason: Reason,
        summary: Summary,
        whose: RequestFacts | QueueEntry,
        row: Whose | None = None,
        queued: bytes = b"",
    ) -> bool:
        state, nonce = REASONS[reason].state, secrets.token_bytes(8)
        terminal = Entry.terminal_from_outside(nonce, state, reason, summary)
        ended = Ended(request_id, (terminal,), summary, queued)
        (reply,) = await self._link.call([end(self._settings, ended, row)])
        if is_id_taken(reply) or not answered(reply):
            return False
        self._telemetry.count("hermes_requests_ended", whose.request_class, state, reason)
        extra = about(request_id, whose.tenant, reason, whose.trace)
        log.info("request %s ended: %s (%s)", request_id, state, reason, extra=extra)
        return True
