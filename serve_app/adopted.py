"""Looks at adopted requests: one question for all of them a round.

An ingress that dies leaves hundreds of running attempts to the others, who only watch: the journals' tails, and whether
the claims are still theirs. Asked one by one, that is thousands of round trips a second, and the loop that has to make
them renews the lease, too.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from serve_app.errors import JournalUnavailable
from serve_app.journal.entries import Entry
from serve_app.journal.store import JournalStore
from serve_app.request_queue.entry import QueueEntry
from serve_app.request_queue.queue import RequestQueue

_GATHER_S = 0.05
_AT_MOST = 250
_LOOK_S = 0.5
_MANY = 500


class Look(NamedTuple):
    """At one request. `tail`: as `JournalStore.read_tails`. `ours`: whether nobody has taken the claim over."""

    tail: list[Entry] | None
    ours: bool


class Adopted:
    """Collects who wants to look, and looks for all at once."""

    def __init__(self, store: JournalStore, queue: RequestQueue) -> None:
        self._store = store
        self._queue = queue
        self._asked: list[tuple[QueueEntry, asyncio.Future[Look]]] = []
        self._round: asyncio.Task[None] | None = None
        self._watched = 0

    async def look(self, entry: QueueEntry) -> Look:
        """Look at a request, a moment later, with all who ask meanwhile.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        future: asyncio.Future[Look] = asyncio.get_running_loop().create_future()
        self._asked.append((entry, future))
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._look_round(), name="adopted-look")
        return await future

    async def pause(self) -> None:
        """Until the next look; longer where many are watched, so that they never take the loop's time."""
        await asyncio.sleep(_LOOK_S * max(1.0, self._watched / _MANY))

    async def _look_round(self) -> None:
        while self._asked:
            await asyncio.sleep(_GATHER_S)
            asked, self._asked = self._asked, []
            self._watched = len(asked)
            for start in range(0, len(asked), _AT_MOST):
                await self._look_at(asked[start : start + _AT_MOST])

    async def _look_at(self, asked: list[tuple[QueueEntry, asyncio.Future[Look]]]) -> None:
        entries = [entry for entry, _ in asked]
        try:
            ours = await self._queue.are_ours(entries)
            tails = await self._store.read_tails([entry.request_id for entry in entries])
        except Exception as error:  # of whatever kind: each that asked must hear of it
            problem = str(error) or type(error).__name__
            for _, future in asked:
                if not future.done():
                    future.set_exception(JournalUnavailable(problem))
            return
        for (_, future), is_ours, tail in zip(asked, ours, tails, strict=True):
            if not future.done():
                future.set_result(Look(tail, is_ours))
