"""Ends requests from outside of a worker's attempt, and notifies listeners.

A cancel, a passed deadline or an attempt that cannot be repeated ends a request through `Endings`.
It writes the terminal entry and then notifies every listener, at most once per request; if Redis's
answer is lost, no listener is notified. If a worker ends a request itself, its attempt writes the
ending (`workers/recorder.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.contract import Reason, State
from serve_app.journal.entries import Entry
from serve_app.journal.store import JournalStore
from serve_app.journal.usage import Whose
from serve_app.observability.logs import about
from serve_app.observability.metrics import Telemetry
from serve_app.request_queue.entry import QueueEntry

log = logging.getLogger("hermes.endings")


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has ended: how, and whose it was."""

    request_id: str
    state: State
    reason: Reason
    request_class: str
    tenant: str
    trace: str = ""
    """The `traceparent` of its HTTP request, if it is traced."""


Listener = Callable[[Ended], None]


class Endings:
    """Ends requests and notifies the listeners: first the metrics, then the log."""

    def __init__(self, store: JournalStore, telemetry: Telemetry) -> None:
        self._store = store
        self._listeners: list[Listener] = [
            lambda ended: telemetry.ended(ended.request_class, ended.state, ended.reason),
            _write_line,
        ]

    def listen(self, listener: Listener) -> None:
        """Call `listener` after every ending that this process writes from now on."""
        self._listeners.append(listener)

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
        whose = (facts.request_class, facts.tenant, facts.trace)
        self._tell(Ended(request_id, state, reason, *whose))
        return True

    async def end_unreadable(self, entry: QueueEntry, state: State, reason: Reason) -> bool:
        """End a request whose journal cannot be decoded; its queue entry says whose it is.

        Returns and raises as `end`.
        """
        row = Whose(entry.tenant, "", entry.request_class, self._store.model)
        if await self._store.end(entry.request_id, state, reason, [], row) is None:
            return False
        whose = (entry.request_class, entry.tenant, entry.trace)
        self._tell(Ended(entry.request_id, state, reason, *whose))
        return True

    def _tell(self, ended: Ended) -> None:
        for listener in self._listeners:
            try:
                listener(ended)
            except Exception:  # it has ended: still notify the other listeners
                log.exception("request %s: a listener for its ending failed", ended.request_id)


def _write_line(ended: Ended) -> None:
    log.info(
        "request %s ended: %s (%s)",
        ended.request_id,
        ended.state,
        ended.reason,
        extra=about(ended.request_id, ended.tenant, ended.reason, ended.trace),
    )
