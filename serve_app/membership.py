"""Who is alive, and how much room there is: leases in Redis, renewed every second.

Keys: sorted sets `{ns}:ingresses` (member: `<ingress id>|<Ray cluster>|<whole: 1 or 0>`) and `{ns}:workers` (member:
`<replica>|<capacity>`); the score is the time in milliseconds, by Redis's clock, at which the lease ends: nodes' clocks
may differ.

In an upgrade without downtime two Ray clusters share the namespace. Clusters are named so that a younger one sorts
behind an older one; once a younger one is whole, the older claims nothing more and ends what it has.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from redis.asyncio import Redis

from serve_app.errors import JournalUnavailable
from serve_app.journal.client import reaching
from serve_app.redis_clock import RedisClock

log = logging.getLogger("hermes.membership")

RENEW_S = 0.5
LEASE_MS = 3_000
_QUICK_S = 0.5


class IngressLease(NamedTuple):
    """An ingress. `whole`: it sees every replica that its Ray cluster is to have."""

    name: str
    cluster: str = ""
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Members:
    """A look at the leases."""

    ingresses: tuple[IngressLease, ...] = ()
    workers: tuple[tuple[str, int], ...] = ()
    trusted: bool = False
    """Whether who is missing is dead: a Redis that was away or slow has kept leases from being renewed, too."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of all ingresses."""
        return tuple(ingress.name for ingress in self.ingresses)

    def ingresses_of(self, cluster: str) -> int:
        """How many ingresses a Ray cluster has."""
        return len({ingress.name for ingress in self.ingresses if ingress.cluster == cluster})

    def superseded(self, cluster: str) -> bool:
        """Whether a younger Ray cluster is there in full."""
        return any(ingress.whole and ingress.cluster > cluster for ingress in self.ingresses)


class Membership:
    """Renews one lease and, for an ingress, looks at all of them. It tells `clock` what Redis's shows."""

    def __init__(
        self, redis: Redis, namespace: str, on_change: Callable[[Members], None] | None = None,
        clock: RedisClock | None = None,
    ) -> None:  # fmt: skip
        self._redis = redis
        self._clock = clock or RedisClock()
        self._ingresses = f"{namespace}:ingresses"
        self._workers = f"{namespace}:workers"
        self._on_change = on_change
        self._task: asyncio.Task[None] | None = None
        self._key = ""
        self._member: Callable[[], str] = str
        self._held = ""
        self.members = Members()
        self.reachable = False
        self._looks_quick_since_s = math.inf
        self._looked_s = -math.inf

    async def join_as_ingress(self, ingress_id: str, cluster: str, whole: Callable[[], bool]) -> None:
        """Take and keep the lease of an ingress; `whole` is asked at every renewal."""
        await self._join(self._ingresses, lambda: f"{ingress_id}|{cluster}|{int(whole())}")

    async def join_as_worker(self, replica: str, capacity: int) -> None:
        """Take and keep the lease of a worker."""
        await self._join(self._workers, lambda: f"{replica}|{capacity}")

    async def _join(self, key: str, member: Callable[[], str]) -> None:
        self._key, self._member = key, member
        await self._renew()
        self._task = asyncio.create_task(self._keep(), name="membership")

    async def leave(self) -> None:
        """Give the lease back."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._held:
            try:
                await reaching(lambda: self._redis.zrem(self._key, self._held))
            except JournalUnavailable as error:
                log.warning("membership: lease not given back, it will expire: %s", error)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            await self._renew()

    async def _renew(self) -> None:
        began_s = time.monotonic()
        before, self._held = self._held, self._member()
        try:
            now_ms = await self._redis_ms()
            asked_s = time.monotonic()
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.time()
            pipeline.zadd(self._key, {self._held: now_ms + LEASE_MS})
            if before not in ("", self._held):
                pipeline.zrem(self._key, before)
            pipeline.zremrangebyscore(self._key, "-inf", now_ms)
            pipeline.zrangebyscore(self._ingresses, now_ms, "+inf")
            pipeline.zrangebyscore(self._workers, now_ms, "+inf")
            clock, *_, ingresses, workers = await reaching(lambda: pipeline.execute())
        except JournalUnavailable as error:
            if self.reachable:
                log.warning("membership: %s", error)
            self.reachable = False
            self._looks_quick_since_s = math.inf
            self._tell(Members(self.members.ingresses, self.members.workers, trusted=False))
            return
        self.reachable = True
        self._clock.told(clock, asked_s)
        trusted = self._quick(began_s)
        self._tell(
            Members(
                tuple(_ingress(member) for member in sorted(ingresses)),
                tuple(_worker(member) for member in sorted(workers)),
                trusted,
            )
        )

    def _quick(self, began_s: float) -> bool:
        """Whether every look was quick for the time of a lease: all who live have renewed theirs meanwhile.

        It also is not where this process itself was stopped: its last look is then older than a renewal.
        """
        now_s = time.monotonic()
        previous_s, self._looked_s = self._looked_s, now_s
        if now_s - began_s > _QUICK_S or now_s - previous_s > RENEW_S + _QUICK_S:
            self._looks_quick_since_s = now_s
        self._looks_quick_since_s = min(self._looks_quick_since_s, now_s)
        return now_s - self._looks_quick_since_s > LEASE_MS / 1000

    async def _redis_ms(self) -> int:
        if not self._clock.known:
            asked_s = time.monotonic()
            self._clock.told(await reaching(lambda: self._redis.time()), asked_s)
        return self._clock.now_ms()

    def _tell(self, members: Members) -> None:
        self.members = members
        if self._on_change is not None:
            self._on_change(members)


def _ingress(member: bytes) -> IngressLease:
    name, cluster, whole, *_ = [*member.decode().split("|"), "", ""]
    return IngressLease(name, cluster, whole == "1")


def _worker(member: bytes) -> tuple[str, int]:
    name, _, capacity = member.decode().rpartition("|")
    return name, int(capacity)
