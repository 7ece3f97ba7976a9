"""Claim → order → route → execute → acknowledge. One in every ingress replica."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import TypeVar

from serve_app.errors import JournalUnavailable, Reason
from serve_app.journal.entries import has_ended
from serve_app.journal.store import JournalStore
from serve_app.membership import Members
from serve_app.request_queue.queue import QueueEntry, RequestQueue
from serve_app.scheduling.order import in_order
from serve_app.settings import Settings
from serve_app.telemetry import Telemetry

log = logging.getLogger("hermes.dispatcher")

T = TypeVar("T")

_RETRY_S = 0.2


class Outcome(StrEnum):
    """What a worker says of an attempt."""

    ENDED = "ended"
    FENCED = "fenced"
    """Another attempt holds the journal, or it is gone."""


Execute = Callable[[str, int, str], Awaitable[Outcome]]
"""`execute(request_id, epoch, session)`. Raises `WorkerLost` if nobody can tell how it went."""


class WorkerLost(Exception):
    """The replica died or became unreachable under a call."""


class Dispatcher:
    """Takes work from the queue when an engine has room, and stays with it until it has ended."""

    def __init__(
        self, settings: Settings, store: JournalStore, queue: RequestQueue, execute: Execute, telemetry: Telemetry
    ) -> None:
        self._settings = settings
        self._store = store
        self._queue = queue
        self._execute = execute
        self._telemetry = telemetry
        self._carried: set[asyncio.Task[None]] = set()
        self._room_changed = asyncio.Event()
        self._window = 0
        self._loop_task: asyncio.Task[None] | None = None

    @property
    def in_flight(self) -> int:
        """Requests that this dispatcher has claimed and that have not ended."""
        return len(self._carried)

    async def start(self) -> None:
        """Begin to claim."""
        self._loop_task = asyncio.create_task(self._run(), name="dispatcher")

    async def stop(self) -> None:
        """Claim nothing more; what is carried is left to whoever takes over."""
        tasks = [task for task in (self._loop_task, *self._carried) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def on_members(self, members: Members) -> None:
        """The room of all engines is divided among the living ingresses."""
        self._window = math.ceil(members.capacity / max(1, len(members.ingresses)))
        self._room_changed.set()

    async def _run(self) -> None:
        while True:
            room = self._window - len(self._carried)
            if room <= 0:
                self._room_changed.clear()
                await self._room_changed.wait()
                continue
            try:
                claimed = await self._queue.claim(room)
            except JournalUnavailable as error:
                log.warning("dispatcher: cannot claim: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            for entry in in_order(claimed):
                task = asyncio.create_task(self._carry(entry), name=f"carry-{entry.request_id}")
                self._carried.add(task)
                task.add_done_callback(self._put_down)

    def _put_down(self, task: asyncio.Task[None]) -> None:
        self._carried.discard(task)
        self._room_changed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("dispatcher: %s failed: %r", task.get_name(), error)

    async def _carry(self, entry: QueueEntry) -> None:
        """One claimed request to its end. The epoch is fixed here, at the claim."""
        self._telemetry.claimed(entry.request_class, time.time() - entry.enqueued_ms / 1000)
        epoch = 1
        while epoch:
            epoch = await self._attempt(entry, epoch)
        await self._until_reached(lambda: self._queue.acknowledge(entry))

    async def _attempt(self, entry: QueueEntry, epoch: int) -> int:
        """One attempt. Returns the epoch of the next, or 0 if the request has ended."""
        if entry.deadline_ms <= time.time() * 1000:
            await self._end(entry, "expired", Reason.DEADLINE)
            return 0
        self._telemetry.attempted(epoch)
        try:
            outcome = await self._execute(entry.request_id, epoch, entry.session)
        except WorkerLost as error:
            log.warning("dispatcher: request %s attempt %d lost: %s", entry.request_id, epoch, error)
            return await self._next_epoch(entry)
        if outcome is Outcome.FENCED:  # a doubled queue entry: the other copy's attempt ends it
            await self._until_ended(entry)
        return 0

    async def _until_ended(self, entry: QueueEntry) -> None:
        while True:
            entries = await self._until_reached(lambda: self._store.read(entry.request_id))
            if not entries or has_ended(entries) or entry.deadline_ms <= time.time() * 1000:
                return
            await asyncio.sleep(1.0)

    async def _next_epoch(self, entry: QueueEntry) -> int:
        """After an attempt that was lost: the epoch to try, or 0 if the request has ended."""
        entries = await self._until_reached(lambda: self._store.read(entry.request_id))
        if not entries or has_ended(entries):
            return 0
        last = entries[-1].id
        if any(e.id.epoch > 0 and (e.body or e.head) for e in entries):
            # What the client may have seen cannot be taken back, and this attempt cannot be continued.
            await self._end(entry, "failed", Reason.ATTEMPT_LOST)
            return 0
        if last.epoch >= self._settings.queue.max_attempts:
            await self._end(entry, "failed", Reason.ATTEMPT_LOST)
            return 0
        await asyncio.sleep(_RETRY_S)
        return last.epoch + 1

    async def _end(self, entry: QueueEntry, state: str, reason: Reason) -> None:
        async def end() -> None:
            entries = await self._store.read(entry.request_id)
            if entries and await self._store.end(entry.request_id, state, reason, entries):
                self._telemetry.ended(entry.request_class, state, reason)
                log.info("request %s ended: %s (%s)", entry.request_id, state, reason)

        await self._until_reached(end)

    async def _until_reached(self, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await call()
            except JournalUnavailable as error:
                log.warning("dispatcher: waiting for Redis: %s", error)
                await asyncio.sleep(_RETRY_S)
