"""Real ingresses in this process, on a real Redis, with a worker that answers at once or on the
test's command.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from serve_app.cluster.leases import Membership
from serve_app.contract import Answer, Outcome, Written
from serve_app.errors import Fenced
from serve_app.journal.writer import JournalWriter
from serve_app.processes.ingress import IngressProcess
from serve_app.redis.client import connect_redis
from tests.journal.in_process import ingress_process
from tests.journal.journal_helpers import OPENED, World, add, finish

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

    async def execute(self, request_id: str, epoch: int, session: str, cause: str) -> Answer:
        """See `WorkerReplica.execute`."""
        self.calls.append((request_id, epoch))
        if not self.opens(request_id, epoch):
            await asyncio.Event().wait()
        try:
            attempt, _ = await self._writer.open(request_id, epoch, secrets.token_bytes(8), OPENED)
        except Fenced:
            return Answer(Outcome.FENCED)
        if request_id in self.busy:
            await self.busy[request_id].wait()
        add(attempt, 1)
        finish(attempt)
        await attempt.closed
        return Answer(Outcome.ENDED, Written(1))


def ingress_of(
    w: World, name: str, worker: WritingWorker, serving: Sequence[str] = (REPLICA,)
) -> AbstractAsyncContextManager[IngressProcess]:
    """An ingress that can send to a worker. `serving`: the replicas that it sees."""
    return ingress_process(w.settings, worker.execute, serving, name)


@asynccontextmanager
async def ingresses(
    w: World, *names: str, capacity: int = 8
) -> AsyncIterator[tuple[WritingWorker, list[IngressProcess]]]:
    """A worker with a lease, and ingresses that can send to it."""
    worker = WritingWorker(await w.writer())
    redis = connect_redis(w.settings.redis)
    membership = Membership(redis, w.settings.namespace)
    await membership.join_as_worker(REPLICA, lambda _: capacity)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(redis.aclose)
        stack.push_async_callback(membership.leave)
        started = [await stack.enter_async_context(ingress_of(w, name, worker)) for name in names]
        yield worker, started


async def ended(w: World, request_id: str) -> bool:
    """Whether a request has been answered and its queue entry deleted."""
    entries = await w.entries(request_id)
    depths = await w.depths()
    return any(entry.ends for entry in entries) and not any(
        depth.waiting + depth.claimed for depth in depths.values()
    )
