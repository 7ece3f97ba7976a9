"""Deadlines of requests that wait, whatever they wait for.

A running request's deadline is kept by its worker, a claimed one's by its carrier. Here it is kept for whoever holds a
connection, and for the waiting lines: where no engine has room, nobody claims what has become too late.
"""

from __future__ import annotations

import asyncio
import logging

from serve_app.errors import JournalUnavailable, Reason
from serve_app.journal.store import JournalStore
from serve_app.logs import Outage, about
from serve_app.loops import Loops, jittered
from serve_app.redis_clock import RedisClock
from serve_app.request_queue.overdue import Waiting
from serve_app.telemetry import Telemetry

log = logging.getLogger("hermes.ingress")

_LATER_S = 1.0
"""A worker's or a carrier's own end comes first, as a rule."""
_SWEEP_S = 1.0


class Deadlines:
    """Ends requests whose deadline has passed."""

    def __init__(
        self, store: JournalStore, waiting: Waiting, clock: RedisClock, telemetry: Telemetry, loops: Loops | None = None
    ) -> None:
        self._loops = loops or Loops(telemetry)
        self._store = store
        self._waiting = waiting
        self._clock = clock
        self._telemetry = telemetry
        self._owed: set[str] = set()
        self._sweeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to look through the waiting lines."""
        self._sweeping = self._loops.keep("deadlines", self._sweep)

    async def stop(self) -> None:
        """Stop; the lines are left to the other ingresses."""
        if self._sweeping is not None:
            await self._loops.end(self._sweeping)

    def due_in_s(self, deadline_ms: int) -> float:
        """After how many seconds whoever holds the connection has to see to it."""
        return max(0.0, deadline_ms / 1000 - self._clock.now_s()) + _LATER_S

    def owe(self, request_id: str) -> None:
        """The client was told that its deadline has passed, and Redis could not be: it will be."""
        self._owed.add(request_id)

    async def end(self, request_id: str) -> None:
        """End a request as expired, unless it has ended.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        entries = await self._store.outline(request_id)
        if entries and await self._store.end(request_id, "expired", Reason.DEADLINE, entries):
            self._telemetry.ended("", "expired", Reason.DEADLINE)
            log.info(
                "request %s ended: expired (deadline)", request_id, extra=about(request_id, reason=Reason.DEADLINE)
            )

    async def _sweep(self) -> None:
        outage = Outage(log, "deadlines: cannot look through the waiting lines")
        while True:
            await asyncio.sleep(jittered(_SWEEP_S))
            try:
                await self.sweep()
                outage.over()
            except JournalUnavailable as error:
                outage.failed(error)

    async def sweep(self) -> None:
        """End what is owed, and what is found in a part of the waiting lines.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        for request_id in list(self._owed):
            await self.end(request_id)
            self._owed.discard(request_id)
        for entry in await self._waiting.overdue(self._clock.now_ms() - int(_LATER_S * 1000)):
            await self.end(entry.request_id)
            await self._waiting.remove(entry)
