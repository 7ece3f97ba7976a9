"""Enforces the deadlines of requests that wait, whatever they wait for.

A worker enforces the deadline of a request that it runs, and an ingress that of a request that it
has claimed. This module covers the ingress that holds the connection, and the queues: if no engine
has capacity, nobody claims a request whose deadline has passed.
"""

from __future__ import annotations

import asyncio
import logging

from serve_app import timings
from serve_app.clock import RedisClock
from serve_app.contract import Reason, State
from serve_app.errors import RedisUnavailable, Unreadable
from serve_app.loops import Loops, jittered
from serve_app.observability.logs import Outage
from serve_app.request_queue.depths import QueueDepths
from serve_app.requests.endings import Endings

log = logging.getLogger("hermes.ingress")


class Deadlines:
    """Ends requests whose deadline has passed."""

    def __init__(
        self,
        endings: Endings,
        depths: QueueDepths,
        clock: RedisClock,
        loops: Loops,
    ) -> None:
        self._loops = loops
        self._endings = endings
        self._depths = depths
        self._clock = clock
        self._owed: set[str] = set()

    async def start(self) -> None:
        """Search the queues, as every ingress does."""
        self._loops.keep("deadlines", self._sweep)

    def due_in_s(self, deadline_ms: int) -> float:
        """After how many seconds the ingress that holds the connection must end the request."""
        return max(0.0, deadline_ms / 1000 - self._clock.now_s()) + timings.DEADLINE_GRACE_S

    def owe(self, request_id: str) -> None:
        """The client was told that its deadline has passed, but Redis could not be reached; Redis
        is updated later.
        """
        self._owed.add(request_id)

    async def end(self, request_id: str) -> None:
        """End a request as expired, unless it has ended.

        Raises:
            RedisUnavailable: Redis cannot be reached.
            Unreadable: its journal cannot be decoded.
        """
        await self._endings.end(request_id, State.EXPIRED, Reason.DEADLINE)

    async def _sweep(self) -> None:
        outage = Outage(log, "deadlines: cannot search the queues")
        while True:
            await asyncio.sleep(jittered(timings.DEADLINE_SWEEP_S))
            try:
                await self.sweep()
                outage.over()
            except RedisUnavailable as error:
                outage.failed(error)

    async def sweep(self) -> None:
        """End requests whose end Redis has not recorded yet, and expired ones found in a part of
        the queues.

        Raises:
            RedisUnavailable: Redis cannot be reached.
        """
        for request_id in list(self._owed):
            await self._end_readable(request_id)
            self._owed.discard(request_id)
        for entry in await self._depths.overdue(
            self._clock.now_ms() - int(timings.DEADLINE_GRACE_S * 1000)
        ):
            if await self._end_readable(entry.request_id):
                await self._depths.remove(entry)

    async def _end_readable(self, request_id: str) -> bool:
        """End a request; False if nobody can read its journal. Who claims it from its queue then
        keeps it as a dead letter.
        """
        try:
            await self.end(request_id)
        except Unreadable as error:
            log.debug("request %s cannot be read: %r", request_id, error)
            return False
        return True
