"""Who is alive, and how much room there is: leases in Redis, renewed every second.

Keys: sorted sets `{ns}:ingresses` (member: ingress id) and `{ns}:workers` (member: `<replica>|<capacity>`);
the score is the Unix time in milliseconds at which the lease ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from redis.asyncio import Redis

from serve_app.errors import JournalUnavailable
from serve_app.journal.client import reaching

log = logging.getLogger("hermes.membership")

RENEW_S = 1.0
LEASE_MS = 4_000


@dataclass(frozen=True, slots=True)
class Members:
    """A look at the leases."""

    ingresses: tuple[str, ...] = ()
    workers: tuple[tuple[str, int], ...] = ()

    @property
    def capacity(self) -> int:
        """Requests that all engines together may hold."""
        return sum(capacity for _, capacity in self.workers)


class Membership:
    """Renews one lease and, for an ingress, looks at all of them."""

    def __init__(self, redis: Redis, namespace: str, on_change: Callable[[Members], None] | None = None) -> None:
        self._redis = redis
        self._ingresses = f"{namespace}:ingresses"
        self._workers = f"{namespace}:workers"
        self._on_change = on_change
        self._task: asyncio.Task[None] | None = None
        self._mine: tuple[str, str] | None = None
        self.members = Members()
        self.reachable = False

    async def join_as_ingress(self, ingress_id: str) -> None:
        """Take and keep the lease of an ingress."""
        await self._join(self._ingresses, ingress_id)

    async def join_as_worker(self, replica: str, capacity: int) -> None:
        """Take and keep the lease of a worker."""
        await self._join(self._workers, f"{replica}|{capacity}")

    async def _join(self, key: str, member: str) -> None:
        self._mine = (key, member)
        await self._renew()
        self._task = asyncio.create_task(self._keep(), name="membership")

    async def leave(self) -> None:
        """Give the lease back."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._mine is not None:
            key, member = self._mine
            try:
                await reaching(lambda: self._redis.zrem(key, member))
            except JournalUnavailable as error:
                log.warning("membership: lease not given back, it will expire: %s", error)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            await self._renew()

    async def _renew(self) -> None:
        assert self._mine is not None
        key, member = self._mine
        now_ms = int(time.time() * 1000)
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.zadd(key, {member: now_ms + LEASE_MS})
        pipeline.zremrangebyscore(key, "-inf", now_ms)
        pipeline.zrangebyscore(self._ingresses, now_ms, "+inf")
        pipeline.zrangebyscore(self._workers, now_ms, "+inf")
        try:
            *_, ingresses, workers = await reaching(lambda: pipeline.execute())
        except JournalUnavailable as error:
            if self.reachable:
                log.warning("membership: %s", error)
            self.reachable = False
            return
        self.reachable = True
        members = Members(
            tuple(sorted(name.decode() for name in ingresses)),
            tuple(_worker(member) for member in sorted(workers)),
        )
        self.members = members
        if self._on_change is not None:
            self._on_change(members)


def _worker(member: bytes) -> tuple[str, int]:
    name, _, capacity = member.decode().rpartition("|")
    return name, int(capacity)
