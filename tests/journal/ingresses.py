"""Real ingresses in this process, on a real Redis, and a worker that answers at once (or when a test says so)."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from journal_helpers import OPENED, World, add, finish

from serve_app.attempts import Outcome
from serve_app.ingress.runtime import Ingress
from serve_app.journal.client import connect_redis
from serve_app.journal.writer import JournalWriter
from serve_app.membership import Membership
from serve_app.routing.fleet import Fleet

REPLICA = OPENED.replica


class Worker:
    """`execute` as a worker replica has it: opens the attempt, appends an event, and completes the request."""

    def __init__(self, writer: JournalWriter) -> None:
        self._writer = writer
        self.calls: list[tuple[str, int]] = []
        self.opens: Callable[[str, int], bool] = lambda request_id, epoch: True
        """Whether a call is worked on; else it never answers."""

    async def execute(self, request_id: str, epoch: int, session: str, cause: str) -> Outcome:
        """See `WorkerReplica.execute`."""
        self.calls.append((request_id, epoch))
        if not self.opens(request_id, epoch):
            await asyncio.Event().wait()
        attempt, _ = await self._writer.open(request_id, epoch, secrets.token_bytes(8), OPENED)
        add(attempt, 1)
        finish(attempt)
        await attempt.closed
        return Outcome.ENDED


@asynccontextmanager
async def ingresses(w: World, *names: str) -> AsyncIterator[tuple[Worker, list[Ingress]]]:
    """A worker with a lease, and ingresses that may send to it."""
    worker = Worker(await w.writer())
    redis = connect_redis(w.settings.redis)
    membership = Membership(redis, w.settings.namespace)
    await membership.join_as_worker(REPLICA, 8)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(redis.aclose)
        stack.push_async_callback(membership.leave)
        started = []
        for name in names:
            fleet = Fleet()
            fleet.serving([REPLICA])
            ingress = Ingress(w.settings, name, "session-1", worker.execute, fleet)
            stack.push_async_callback(ingress.stop)
            await ingress.start()
            started.append(ingress)
        yield worker, started


async def ended(w: World, request_id: str) -> bool:
    """Whether a request has been answered, and the queue has forgotten it."""
    entries = await w.entries(request_id)
    depths = await w.queue().depths()
    return any(entry.ends for entry in entries) and not any(depth.waiting + depth.claimed for depth in depths.values())
