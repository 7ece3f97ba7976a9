"""Ends requests from outside of a worker's attempt: a cancel, a passed deadline, an attempt that
cannot be repeated.

An end is counted and logged once, by whoever has ended the request; if Redis's answer is lost, by
nobody. If a worker ends a request itself, its attempt writes the end (`workers/attempt.py`).
"""

from __future__ import annotations

import logging
import secrets
from functools import partial

from serve_app import timings
from serve_app.clock import RedisClock
from serve_app.contract import Reason, State
from serve_app.errors import Unreadable
from serve_app.journal.entries import Entry, RequestFacts, Summary
from serve_app.journal.ledger import Whose
from serve_app.loops import Loops, repeat
from serve_app.observability.logs import Outage, about
from serve_app.observability.metrics import Telemetry
from serve_app.request_queue import QueueDepths, QueueEntry
from serve_app.requests.lifecycle import Ended, Record
from serve_app.requests.store import JournalStore

log = logging.getLogger("hermes.endings")


class Endings:
    """Ends requests, and tells the metrics and the log. What ends one raises `RedisUnavailable` if
    Redis cannot be reached, or it is unknown whether the request ended.
    """

    def __init__(self, store: JournalStore, telemetry: Telemetry) -> None:
        self._store = store
        self._telemetry = telemetry

    async def end(
        self, request_id: str, state: State, reason: Reason, record: Record | None = None
    ) -> bool:
        """End a request, unless it has ended or is gone. Returns whether this call ended it.

        Args:
            record: what is known of it, if the caller has read it; this saves a round trip.
        """
        record = record or await self._store.record(request_id)
        if record is None or record.ended:
            return False
        facts, summary = record.facts, record.ending(self._store.clock.now_ms())
        assert facts is not None, "a record begins with the request, unless it has ended"
        queued = record.first.queue_entry
        return await self._end(request_id, state, reason, summary, facts, queued=queued)

    async def end_unreadable(self, entry: QueueEntry, state: State, reason: Reason) -> bool:
        """The same for a request whose journal cannot be decoded; its queue entry says whose it
        is.
        """
        summary = Summary(None, None, 0, self._store.clock.now_ms())
        row = Whose(entry.tenant, "", entry.request_class, self._store.model)
        return await self._end(entry.request_id, state, reason, summary, entry, row)

    async def _end(
        self,
        request_id: str,
        state: State,
        reason: Reason,
        summary: Summary,
        whose: RequestFacts | QueueEntry,
        row: Whose | None = None,
        queued: bytes = b"",
    ) -> bool:
        terminal = Entry.terminal_from_outside(secrets.token_bytes(8), state, reason, summary)
        if not await self._store.end(Ended(request_id, (terminal,), summary, queued), row):
            return False
        self._telemetry.count("hermes_requests_ended", whose.request_class, state, reason or "")
        extra = about(request_id, whose.tenant, reason, whose.trace)
        log.info("request %s ended: %s (%s)", request_id, state, reason, extra=extra)
        return True


class Deadlines:
    """Ends requests whose deadline has passed, whatever they wait for.

    A worker enforces the deadline of a request that it runs, and an ingress that of a request that
    it has claimed. This covers the ingress that holds the connection, and the queues: if no engine
    has capacity, nobody claims a request whose deadline has passed.
    """

    def __init__(
        self, endings: Endings, depths: QueueDepths, clock: RedisClock, loops: Loops
    ) -> None:
        self._loops = loops
        self._endings = endings
        self._depths = depths
        self._clock = clock

    async def start(self) -> None:
        outage = Outage(log, "deadlines: cannot search the queues")
        sweeping = partial(repeat, timings.DEADLINE_SWEEP_S, self.sweep, outage)
        self._loops.keep("deadlines", sweeping)

    def due_in_s(self, deadline_ms: int) -> float:
        """After how many seconds the ingress that holds the connection must end the request."""
        return max(0.0, deadline_ms / 1000 - self._clock.now_s()) + timings.DEADLINE_GRACE_S

    async def expire(self, request_id: str) -> None:
        """End a request as expired, unless it has ended; raises `Unreadable` if its journal is."""
        await self._endings.end(request_id, State.EXPIRED, Reason.DEADLINE)

    async def sweep(self) -> None:
        """End the expired requests in a part of the queues. Whoever claims one whose journal nobody
        can read keeps it as a dead letter.
        """
        late_ms = self._clock.now_ms() - int(timings.DEADLINE_GRACE_S * 1000)
        for entry in await self._depths.overdue(late_ms):
            try:
                await self.expire(entry.request_id)
            except Unreadable as error:
                log.debug("request %s cannot be read: %r", entry.request_id, error)
            else:
                await self._depths.remove(entry)
