"""Follows one journal for one connection: with wake-ups, and with the stream if a wake-up was
missed.

New bytes go straight to the client (`push`) while the connection's task only waits for them: a task
switch for every token would cost more than the send. Everything else wakes the task.
"""

from __future__ import annotations

import asyncio
import logging
import math
import zlib
from collections.abc import Callable

import msgspec

from serve_app import timings
from serve_app.clock import SYSTEM
from serve_app.contract import Reason, State
from serve_app.errors import RedisUnavailable
from serve_app.journal.ending import Ending
from serve_app.journal.entries import Entry
from serve_app.journal.reader import JournalReader
from serve_app.journal.store import JournalStore

log = logging.getLogger("hermes.journal")


class Follower:
    """Follows one journal for one connection."""

    def __init__(self, store: JournalStore, request_id: str, reader: JournalReader) -> None:
        self.request_id = request_id
        self.reader = reader
        self.stale = False
        self.fed_at = (
            math.inf
        )  # silence counts only once somebody waits, because the journal may not exist yet
        self.due_at: float | None = None
        """When to stop waiting for an answer from Redis, by the event loop's clock."""
        self.on_begun: Callable[[], None] | None = None
        """Called once, when a worker has started the request or none will."""
        self.push: Callable[[], bool] | None = None
        """Sends what the reader holds, outside of the connection's task; False if that task must
        run.
        """
        self._store = store
        self._idle = False
        self._woken = asyncio.Event()

    def wake(self, stale: bool = False) -> None:
        """The reader has something new or, if `stale`, the stream may have."""
        self.stale = self.stale or stale
        self._woken.set()

    def deliver(self, entry: Entry, now_s: float) -> None:
        """An entry that follows directly on what the reader has (hot path)."""
        self.feed([entry])
        if self._idle and self.push is not None and not self._woken.is_set() and self.push():
            self.fed_at = now_s
        else:
            self._woken.set()

    def begun(self) -> None:
        """The request no longer waits, or nobody is left to observe it."""
        if self.on_begun is not None:
            on_begun, self.on_begun = self.on_begun, None
            on_begun()

    async def wait(self) -> None:
        """Wait until the reader may hold something new. If Redis is unreachable, this only takes
        longer.
        """
        self.fed_at = min(self.fed_at, SYSTEM.monotonic_s())
        self._idle = True
        try:
            await self._woken.wait()
        finally:
            self._idle = False
        self._woken.clear()
        self.fed_at = SYSTEM.monotonic_s()
        if self.on_begun is not None and (
            self.reader.attempt is not None or self.reader.ending is not None
        ):
            self.begun()
        if self.stale and self.reader.ending is None:
            self.stale = False
            try:
                async with asyncio.timeout_at(self.due_at):
                    await self.catch_up()
            except (RedisUnavailable, TimeoutError):
                self.stale = True  # the next check for silence wakes it again

    async def catch_up(self) -> None:
        """Read one page of the stream after the current position; the next page follows when this
        one has been consumed.

        Raises:
            RedisUnavailable: Redis cannot be reached.
        """
        wanted = [(self.request_id, self.reader.position)]
        (entries,) = await self._store.read_many(wanted, timings.PAGE_ENTRIES)
        self.feed(entries, timings.PAGE_ENTRIES)

    def feed(self, entries: list[Entry] | None, at_most: int = 0) -> None:
        """Pass on entries from a wake-up, or from a read of `at_most` entries of the stream; None:
        the journal is gone.
        """
        if at_most and entries is not None and len(entries) == at_most:
            self.wake(stale=True)
        if entries is None:
            self.reader.ending = self.reader.ending or Ending(
                State.FAILED, Reason.JOURNAL_LOST, None
            )
        try:
            for entry in entries or ():
                self.reader.feed(entry)
        except (msgspec.DecodeError, LookupError, ValueError, zlib.error) as error:
            log.error("request %s has a journal that cannot be read: %r", self.request_id, error)
            self.reader.ending = Ending(State.FAILED, Reason.JOURNAL_LOST, None)
