"""Claim → order → carry. One in every ingress replica; it also takes over what dead ingresses have claimed."""

from __future__ import annotations

import asyncio
import logging
import math
import time

from serve_app.carrier import Carrier
from serve_app.errors import JournalUnavailable
from serve_app.logs import Outage, about
from serve_app.loops import Loops, ended, jittered
from serve_app.membership import Members
from serve_app.request_queue.entry import QueueEntry
from serve_app.request_queue.queue import RequestQueue
from serve_app.routing.fleet import Fleet
from serve_app.scheduling.order import in_order

log = logging.getLogger("hermes.dispatcher")

_RETRY_S = 0.2
_TAKE_OVER_S = 0.5
TELL_AFTER_S = 15.0
_TELL_AT_MOST = 20


class Dispatcher:
    """Takes work from the queue when an engine has room, and stays with it until it has ended."""

    def __init__(
        self, queue: RequestQueue, carrier: Carrier, fleet: Fleet, cluster: str, loops: Loops | None = None
    ) -> None:
        self._queue = queue
        self._carrier = carrier
        self._fleet = fleet
        self._cluster = cluster
        self._loops = loops or Loops()
        self._superseded = False
        self._carried: dict[asyncio.Task[None], QueueEntry] = {}
        self._room_changed = asyncio.Event()
        self._members = Members()
        self._window = 0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def in_flight(self) -> int:
        """Requests that this dispatcher has claimed and that have not ended."""
        return len(self._carried)

    async def start(self) -> None:
        """Begin to claim."""
        self._tasks = [
            self._loops.keep("dispatcher", self._run),
            self._loops.keep("take-over", self._take_over),
            self._loops.keep("watchdog", self._tell_who_waits),
        ]

    async def stop(self) -> None:
        """Claim nothing more; what is carried is left to whoever takes over."""
        await self._loops.end(*self._tasks)
        await ended(list(self._carried))

    def on_members(self, members: Members) -> None:
        """The room of this Ray cluster's engines is divided among its living ingresses.

        Once a younger cluster is whole it gets all that is not yet claimed: what this one were still to begin would be
        cut off with it, and a new version asked for would be answered by the old.
        """
        self._members = members
        self._fleet.forgive(time.monotonic())
        self._fleet.leased(members.living if members.trusted else None)
        room, ingresses = sum(self._fleet.mine(members.workers).values()), members.ingresses_of(self._cluster)
        superseded = members.superseded(self._cluster)
        if superseded != self._superseded:
            log.info("dispatcher: %s", "a younger Ray cluster takes what comes" if superseded else "claiming again")
        self._superseded = superseded
        self._window = 0 if superseded else math.ceil(room / max(1, ingresses))
        self._room_changed.set()

    async def _run(self) -> None:
        outage = Outage(log, "dispatcher: cannot claim")
        while True:
            room = self._window - len(self._carried)
            if room <= 0:
                self._room_changed.clear()
                await self._room_changed.wait()
                continue
            try:
                claimed = await self._queue.claim(room)
            except JournalUnavailable as error:
                outage.failed(error)
                await asyncio.sleep(jittered(_RETRY_S))
                continue
            outage.over()
            for entry in in_order(claimed):
                self._carry(entry)

    async def _take_over(self) -> None:
        """What nobody carries: claims of this ingress's own whose answer was lost, and those of dead ingresses.

        The latter only while it is certain that who has no lease is dead: after a Redis that was away, nobody has
        one. One's own claims need no such certainty: that they are not carried is known here.
        """
        outage = Outage(log, "dispatcher: cannot take over")
        while True:
            await asyncio.sleep(jittered(_TAKE_OVER_S))
            certain = self._members.trusted and not self._superseded
            try:
                carried = {entry.entry_id for entry in self._carried.values()}
                taken = await self._queue.take_over(self._members.living if certain else None, carried)
            except JournalUnavailable as error:
                outage.failed(error)
                continue
            outage.over()
            if taken:
                log.info("dispatcher: took over %d requests that nobody carried", len(taken))
            for entry in in_order(taken):
                self._carry(entry)

    async def _tell_who_waits(self) -> None:
        """Every carried request moves, or it is known why not."""
        while True:
            await asyncio.sleep(TELL_AFTER_S)
            waiting = self._carrier.waits.longer_than(TELL_AFTER_S, now_s := time.monotonic())
            for request_id, what, since_s in waiting[:_TELL_AT_MOST]:
                log.warning(
                    "dispatcher: request %s has waited for %.0f s: %s", request_id, now_s - since_s, what,
                    extra=about(request_id, reason=what),
                )  # fmt: skip
            if len(waiting) > _TELL_AT_MOST:
                log.warning("dispatcher: and %d more", len(waiting) - _TELL_AT_MOST)

    def _carry(self, entry: QueueEntry) -> None:
        task = asyncio.create_task(self._carrier.carry(entry), name=f"carry-{entry.request_id}")
        self._carried[task] = entry
        task.add_done_callback(self._put_down)

    def _put_down(self, task: asyncio.Task[None]) -> None:
        del self._carried[task]
        self._room_changed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            # The entry stays claimed, and is taken up again from the queue.
            log.error("dispatcher: %s failed: %r", task.get_name(), error)
