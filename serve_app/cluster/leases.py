"""Which processes are alive, and their capacity: leases in Redis, renewed twice a second.

The sorted sets `{ns}:ingresses` and `{ns}:workers` have `IngressLease` and `WorkerLease` as
members. The score is the end of the lease in milliseconds by Redis's clock, because nodes' clocks
may differ. With its lease a worker renews in `{ns}:engines` what its engine reports
(`EngineReport`), and in `{ns}:calls` where it takes calls, in the same round trip.

During an upgrade without downtime two Ray clusters share the namespace. Once the newer one is
complete, the older one, if it serves the same model, claims nothing more and only finishes its own
requests. An ingress takes its lease after it was let into the namespace (`entrance.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from serve_app import timings
from serve_app.clock import RedisClock
from serve_app.cluster.entrance import Entrance
from serve_app.cluster.members import Members, Trust
from serve_app.contract import EngineReport, IngressLease, WorkerAddress, WorkerLease
from serve_app.errors import RedisUnavailable
from serve_app.loops import Loops
from serve_app.redis.client import redis_call
from serve_app.redis.keyspace import calls_key, engines_key, ingresses_key, workers_key

log = logging.getLogger("hermes.membership")

T = TypeVar("T", IngressLease, WorkerLease, EngineReport, WorkerAddress)


class Membership:
    """Renews one lease and, in an ingress, reads all of them. It passes Redis's time on to
    `clock`.
    """

    def __init__(
        self,
        redis: Redis,
        namespace: str,
        on_change: Callable[[Members], None] | None = None,
        clock: RedisClock | None = None,
        loops: Loops | None = None,
    ) -> None:
        self._redis = redis
        self._clock = clock or RedisClock()
        self._loops = loops or Loops()
        self._ingresses = ingresses_key(namespace)
        self._workers = workers_key(namespace)
        self._engines = engines_key(namespace)
        self._calls = calls_key(namespace)
        self._on_change = on_change
        self._task: asyncio.Task[None] | None = None
        self._key = ""
        self._member: Callable[[EngineReport | None], str] = str
        self._held = ""
        self._told: dict[str, str] = {}
        """What is renewed beside the lease, by its Redis key."""
        self._address: WorkerAddress | None = None
        self._report: Callable[[], EngineReport | None] = lambda: None
        self.members = Members()
        self.reachable = False
        self._trust = Trust()
        self._entrance: Entrance | None = None
        self._certain = False
        """Whether who has no lease is dead, while this ingress is not let in."""

    async def join_as_ingress(
        self, lease: Callable[[], IngressLease], entrance: Entrance | None = None
    ) -> None:
        """Acquire and keep the lease of an ingress, once the entrance lets it in; `lease` is called
        at every renewal.
        """
        self._entrance = entrance

        def member(_: EngineReport | None) -> str:
            since_ms = entrance.since_ms if entrance else 0
            return lease()._replace(since_ms=since_ms).encode()

        await self._join(self._ingresses, member)

    async def join_as_worker(
        self,
        replica: str,
        capacity: Callable[[EngineReport | None], int],
        report: Callable[[], EngineReport | None] = lambda: None,
        address: WorkerAddress | None = None,
    ) -> None:
        """Acquire and keep the lease of a worker; `report`, and then `capacity` with what it
        has returned, are called at every renewal.
        """
        self._report = report
        self._address = address
        await self._join(
            self._workers, lambda engine: WorkerLease(replica, capacity(engine)).encode()
        )

    async def _join(self, key: str, member: Callable[[EngineReport | None], str]) -> None:
        self._key, self._member = key, member
        await self._renew()
        self._task = self._loops.keep("membership", self._keep)

    async def leave(self) -> None:
        if self._task is not None:
            await self._loops.end(self._task)
        if self._held:
            try:
                await redis_call(lambda: self._redis.zrem(self._key, self._held))
                for key, told in self._told.items():
                    await redis_call(lambda key=key, told=told: self._redis.zrem(key, told))  # type: ignore[misc]
            except RedisUnavailable as error:
                log.warning("membership: cannot delete the lease, it will expire: %s", error)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(timings.LEASE_RENEW_S)
            await self._renew()

    async def _renew(self) -> None:
        began_s = self._clock.local.monotonic_s()
        report = self._report()
        try:
            now_ms = await self._redis_ms()
            if self._entrance is not None and not await self._enters(self._entrance, now_ms):
                self.reachable = True
                now_s = self._clock.local.monotonic_s()
                self._certain = self._trust.judged(began_s, now_s, (), ()).trusted
                return
            before, self._held = self._held, self._member(report)
            asked_s = self._clock.local.monotonic_s()
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.time()
            pipeline.zadd(self._key, {self._held: now_ms + timings.LEASE_MS})
            if before not in ("", self._held):
                pipeline.zrem(self._key, before)
            pipeline.zremrangebyscore(self._key, "-inf", now_ms)
            if report is not None:
                self._renew_beside(pipeline, self._engines, report.encode(), now_ms)
            if self._address is not None:
                self._renew_beside(pipeline, self._calls, self._address.encode(), now_ms)
            pipeline.zrangebyscore(self._ingresses, now_ms, "+inf")
            pipeline.zrangebyscore(self._workers, now_ms, "+inf")
            pipeline.zrangebyscore(self._engines, now_ms, "+inf")
            pipeline.zrangebyscore(self._calls, now_ms, "+inf")
            if self._entrance is not None:
                pipeline.execute_command(*self._entrance.command(now_ms))
            replies = await redis_call(lambda: pipeline.execute())
            if self._entrance is not None:
                self._entrance.answered(replies.pop())
            clock, *_, ingresses, workers, engines, addresses = replies
        except RedisUnavailable as error:
            if self.reachable:
                log.warning("membership: %s", error)
            self.reachable = self._certain = False
            self._trust.failed()
            self._tell(replace(self.members, trusted=False, lately=frozenset()))
            return
        self.reachable = True
        self._clock.told(clock, asked_s)
        judged = self._trust.judged(
            began_s,
            self._clock.local.monotonic_s(),
            _decoded(IngressLease.decode, ingresses),
            _decoded(WorkerLease.decode, workers),
        )
        reports = _decoded(EngineReport.decode, engines)
        where = _decoded(WorkerAddress.decode, addresses)
        self._tell(replace(judged, engines=reports, addresses=where))

    async def _enters(self, entrance: Entrance, now_ms: int) -> bool:
        """Whether an ingress is let in, or was; it asks every time until it is."""
        if not entrance.let_in:
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.execute_command(*entrance.command(now_ms, self._certain))
            (reply,) = await redis_call(lambda: pipeline.execute())
            entrance.answered(reply)
        return entrance.let_in

    def _renew_beside(self, pipeline: Pipeline, key: str, member: str, now_ms: int) -> None:
        before, self._told[key] = self._told.get(key), member
        pipeline.zadd(key, {member: now_ms + timings.LEASE_MS})
        if before not in (None, member):
            pipeline.zrem(key, before)
        pipeline.zremrangebyscore(key, "-inf", now_ms)

    async def _redis_ms(self) -> int:
        if not self._clock.known:
            asked_s = self._clock.local.monotonic_s()
            self._clock.told(await redis_call(lambda: self._redis.time()), asked_s)
        return self._clock.now_ms()

    def _tell(self, members: Members) -> None:
        self.members = members
        if self._on_change is not None:
            self._on_change(members)


def _decoded(decode: Callable[[bytes], T], members: Iterable[bytes]) -> tuple[T, ...]:
    """The members that can be decoded, by name; one malformed member must not hide the others.

    Args:
        members: by the end of their leases. A process whose renewal was cut off may have two.
    """
    found: dict[str, T] = {}
    for member in members:
        try:
            lease = decode(member)
        except ValueError:
            log.warning("membership: ignoring a malformed member of %d bytes", len(member))
        else:
            found[lease.name] = lease
    return tuple(found[name] for name in sorted(found))
