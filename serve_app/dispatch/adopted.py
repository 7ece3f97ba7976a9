"""Checks adopted requests together, in one round trip.

An ingress that dies leaves hundreds of running attempts to the others. These only watch the
journals' tails, and whether the claims are still theirs. Individual checks would take thousands of
round trips per second, in the same event loop that renews the lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from serve_app import timings
from serve_app.errors import RedisUnavailable
from serve_app.journal.entries import Entry
from serve_app.journal.ids import REQUEST_ID
from serve_app.journal.store import JournalStore
from serve_app.request_queue.entry import QueueEntry
from serve_app.request_queue.queue import RequestQueue


class Look(NamedTuple):
    """The result of one check. `tail`: as `JournalStore.read_tails`; `ours`: whether nobody has
    taken the claim over.
    """

    tail: list[Entry] | None
    ours: bool


class Adopted:
    """Collects requests to check, and checks all of them at once."""

    def __init__(self, store: JournalStore, queue: RequestQueue) -> None:
        self._store = store
        self._queue = queue
        self._asked: list[tuple[QueueEntry, asyncio.Future[Look]]] = []
        self._round: asyncio.Task[None] | None = None
        self._watched = 0

    async def begun(self, entries: Sequence[QueueEntry]) -> set[tuple[str, str]]:
        """Which of these have an attempt, or have ended, by `QueueEntry.key`; checks many in two
        round trips.

        Raises:
            RedisUnavailable: Redis cannot be reached.
        """
        if not entries:
            return set()
        tails = await self._store.read_tails([entry.request_id for entry in entries])
        return {
            entry.key
            for entry, tail in zip(entries, tails, strict=True)
            if tail is None or tail[-1].id != REQUEST_ID
        }

    async def look(self, entry: QueueEntry) -> Look:
        """Check a request a moment later, together with all others requested meanwhile.

        Raises:
            RedisUnavailable: Redis cannot be reached.
        """
        future: asyncio.Future[Look] = asyncio.get_running_loop().create_future()
        self._asked.append((entry, future))
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._look_round(), name="adopted-look")
        return await future

    async def pause(self) -> None:
        """Wait until the next check; longer if many requests are watched, so that checks never
        occupy the loop.
        """
        await asyncio.sleep(timings.ADOPTED_LOOK_S * max(1.0, self._watched / timings.ADOPTED_MANY))

    async def _look_round(self) -> None:
        while self._asked:
            await asyncio.sleep(timings.ADOPTED_GATHER_S)
            asked, self._asked = self._asked, []
            self._watched = len(asked)
            for start in range(0, len(asked), timings.ADOPTED_A_LOOK):
                await self._look_at(asked[start : start + timings.ADOPTED_A_LOOK])

    async def _look_at(self, asked: list[tuple[QueueEntry, asyncio.Future[Look]]]) -> None:
        entries = [entry for entry, _ in asked]
        try:
            ours = await self._queue.are_ours(entries)
            tails = await self._store.read_tails([entry.request_id for entry in entries])
        except Exception as error:  # any kind of error: every caller must get it
            problem = str(error) or type(error).__name__
            for _, future in asked:
                if not future.done():
                    future.set_exception(RedisUnavailable(problem))
            return
        for (_, future), is_ours, tail in zip(asked, ours, tails, strict=True):
            if not future.done():
                future.set_result(Look(tail, is_ours))
