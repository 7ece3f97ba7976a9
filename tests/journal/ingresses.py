"""A real ingress in this process, on a real Redis, with a worker that answers at once or on the
test's command.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from msgspec.structs import replace

from serve_app.cluster.leases import Membership
from serve_app.contract import AttemptResult, CallResult, CompletionStats, WorkerLost
from serve_app.errors import Fenced
from serve_app.processes import IngressProcess
from tests.journal.in_process import ingress_process
from tests.journal.journal_helpers import OPENED, World, add, complete
from workers.journal_writer import JournalWriter

REPLICA = OPENED.replica


class WritingWorker:
    """`execute` as a worker replica has it: opens the attempt, appends an event, and completes the
    request.
    """

    def __init__(self, writer: JournalWriter) -> None:
        self._writer = writer
        self.calls: list[tuple[str, int]] = []
        self.opens: Callable[[str, int], bool] = lambda request_id, epoch: True
        """Whether calls are worked on; otherwise they are never answered."""
        self.busy: dict[str, asyncio.Event] = {}
        """Requests that are answered only after their event is set."""
        self.deadly: set[str] = set()
        """Requests with which the worker dies."""

    @property
    def order(self) -> list[str]:
        """The requests of the calls so far."""
        return [request_id for request_id, _ in self.calls]

    async def execute(self, request_id: str, epoch: int, replica: str, cause: str) -> AttemptResult:
        """See `WorkerReplica.execute`."""
        self.calls.append((request_id, epoch))
        if not self.opens(request_id, epoch):
            await asyncio.Event().wait()
        try:
            facts = replace(OPENED, cause=cause)
            attempt, _ = await self._writer.open(request_id, epoch, secrets.token_bytes(8), facts)
        except Fenced:
            return AttemptResult(CallResult.FENCED)
        if request_id in self.deadly:
            raise WorkerLost
        if request_id in self.busy:
            await self.busy[request_id].wait()
        add(attempt, 1)
        await complete(attempt)
        return AttemptResult(CallResult.ENDED, CompletionStats(1))


def ingress_of(
    w: World, name: str, worker: WritingWorker, serving: Sequence[str] = (REPLICA,)
) -> AbstractAsyncContextManager[IngressProcess]:
    """An ingress that can send to a worker. `serving`: the replicas that it sees."""
    return ingress_process(w.settings, worker.execute, serving, name)


@asynccontextmanager
async def serving(
    w: World, name: str = "ingress-1", capacity: int = 8
) -> AsyncIterator[tuple[WritingWorker, IngressProcess]]:
    """A worker with a lease, and an ingress that can send to it."""
    worker = WritingWorker(await w.writer())
    membership = Membership(w.link, w.settings.namespace)
    await membership.join_as_worker(REPLICA, lambda _: capacity)
    try:
        async with ingress_of(w, name, worker) as ingress:
            yield worker, ingress
    finally:
        await membership.leave()


async def ended(w: World, request_id: str) -> bool:
    """Whether a request has been answered and its queue entry deleted."""
    left = [depth.waiting + depth.claimed for depth in (await w.depths()).values()]
    return any(await w.ending(request_id)) and not any(left)
