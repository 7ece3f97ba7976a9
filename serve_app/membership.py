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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from redis.asyncio import Redis

from serve_app.errors import JournalUnavailable
from serve_app.journal.client import reaching
from serve_app.loops import Loops
from serve_app.redis_clock import RedisClock

log = logging.getLogger("hermes.membership")

T = TypeVar("T")

RENEW_S = 0.5
LEASE_MS = 3_000
PATIENCE_S = 10.0
"""Of looks that Redis has answered, none quick enough to be sure: who is in none of them is dead (docs/adr/0013)."""
_QUICK_S = 0.5
STEADY_S = LEASE_MS / 1000 - RENEW_S
"""A renewal that takes as long as such a look still leaves a lease."""


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
    """Whether who is not `living` is dead: a Redis that was away or slow has kept leases from being renewed, too."""
    lately: frozenset[str] = frozenset()
    """Who is missing now, but was there a moment ago, while looks are slow."""

    @property
    def living(self) -> frozenset[str]:
        """Ingresses and workers that hold a lease, and such as may only have been too slow to renew it."""
        return self.lately.union(self.names, (name for name, _ in self.workers))

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
        clock: RedisClock | None = None, loops: Loops | None = None,
    ) -> None:  # fmt: skip
        self._redis = redis
        self._clock = clock or RedisClock()
        self._loops = loops or Loops()
        self._ingresses = f"{namespace}:ingresses"
        self._workers = f"{namespace}:workers"
        self._on_change = on_change
        self._task: asyncio.Task[None] | None = None
        self._key = ""
        self._member: Callable[[], str] = str
        self._held = ""
        self.members = Members()
        self.reachable = False
        self._trust = _Trust()

    async def join_as_ingress(self, ingress_id: str, cluster: str, whole: Callable[[], bool]) -> None:
        """Take and keep the lease of an ingress; `whole` is asked at every renewal."""
        await self._join(self._ingresses, lambda: f"{ingress_id}|{cluster}|{int(whole())}")

    async def join_as_worker(self, replica: str, capacity: int) -> None:
        """Take and keep the lease of a worker."""
        await self._join(self._workers, lambda: f"{replica}|{capacity}")

    async def _join(self, key: str, member: Callable[[], str]) -> None:
        self._key, self._member = key, member
        await self._renew()
        self._task = self._loops.keep("membership", self._keep)

    async def leave(self) -> None:
        """Give the lease back."""
        if self._task is not None:
            await self._loops.end(self._task)
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
            self._trust.failed()
            self._tell(Members(self.members.ingresses, self.members.workers, trusted=False))
            return
        self.reachable = True
        self._clock.told(clock, asked_s)
        self._tell(
            self._trust.judged(
                began_s, time.monotonic(), tuple(_decoded(_ingress, ingresses)), tuple(_decoded(_worker, workers))
            )
        )

    async def _redis_ms(self) -> int:
        if not self._clock.known:
            asked_s = time.monotonic()
            self._clock.told(await reaching(lambda: self._redis.time()), asked_s)
        return self._clock.now_ms()

    def _tell(self, members: Members) -> None:
        self.members = members
        if self._on_change is not None:
            self._on_change(members)


class _Trust:
    """What looks at the leases are worth: when a missing lease means a death (docs/adr/0010, 0013). Pure."""

    def __init__(self) -> None:
        self._quick_since_s = math.inf
        self._steady_since_s = math.inf
        self._looked_s = -math.inf
        self._seen_s: dict[str, float] = {}

    def failed(self) -> None:
        """Redis did not answer: nobody can have renewed a lease."""
        self._quick_since_s = self._steady_since_s = math.inf

    def judged(
        self, began_s: float, now_s: float, ingresses: tuple[IngressLease, ...], workers: tuple[tuple[str, int], ...]
    ) -> Members:
        """A look that began at `began_s` and was answered.

        Quick looks for the time of a lease: all who live have renewed theirs meanwhile, so who is missing is dead at
        once. It is not so where Redis is slow, or this process: it was stopped itself, or its machine is busy. There
        it takes `PATIENCE_S` of answered looks, and only who was in none of them is dead: so the wait has an end,
        however slow the machine is.
        """
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        self._quick_since_s = min(self._quick_since_s, now_s)
        self._steady_since_s = min(self._steady_since_s, now_s)
        if now_s - began_s > _QUICK_S or gap_s > RENEW_S + _QUICK_S:
            self._quick_since_s = now_s
        if now_s - began_s > STEADY_S or gap_s > PATIENCE_S / 2:
            self._steady_since_s = now_s
        present = [*(ingress.name for ingress in ingresses), *(name for name, _ in workers)]
        self._seen_s.update(dict.fromkeys(present, now_s))
        self._seen_s = {name: seen_s for name, seen_s in self._seen_s.items() if now_s - seen_s <= PATIENCE_S}
        if now_s - self._quick_since_s > LEASE_MS / 1000:
            return Members(ingresses, workers, trusted=True)
        lately = frozenset(self._seen_s).difference(present)
        return Members(ingresses, workers, now_s - self._steady_since_s > PATIENCE_S, lately)


def _decoded(decode: Callable[[bytes], T], members: Iterable[bytes]) -> Iterator[T]:
    """What can be read: one malformed member must not hide the others."""
    for member in sorted(members):
        try:
            yield decode(member)
        except ValueError:
            log.warning("membership: a member that nobody can read is left out: %r", member[:200])


def _ingress(member: bytes) -> IngressLease:
    name, cluster, whole, *_ = [*member.decode().split("|"), "", ""]
    return IngressLease(name, cluster, whole == "1")


def _worker(member: bytes) -> tuple[str, int]:
    name, _, capacity = member.decode().rpartition("|")
    return name, int(capacity)
