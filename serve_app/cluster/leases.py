"""Which processes are alive, and their capacity: leases in Redis, renewed twice a second, in the
same round trip as the questions of `Entrance` and `KeyNotices`.

The sorted sets `{ns}:ingresses` and `{ns}:workers` have `IngressLease` and `WorkerLease` as
members. The score is the end of the lease in milliseconds by Redis's clock, because nodes' clocks
may differ. With its lease a worker renews in `{ns}:engines` what its engine reports
(`EngineReport`), and in `{ns}:calls` where it takes calls, in the same round trip.

During an upgrade without downtime two Ray clusters share the namespace. Once the newer one is
complete, the older one, if it serves the same model, claims nothing more and only finishes its own
requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from serve_app import timings
from serve_app.clock import RedisClock
from serve_app.cluster.entrance import Entrance
from serve_app.cluster.key_notices import KeyNotices
from serve_app.cluster.members import Members, Trust
from serve_app.contract import EngineReport, IngressLease, WorkerAddress, WorkerLease
from serve_app.errors import RedisUnavailable
from serve_app.loops import Loops
from serve_app.redis.connection import Command
from serve_app.redis.keyspace import (
    calls_key,
    engines_key,
    ingresses_key,
    workers_key,
)
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import all_answered

log = logging.getLogger("hermes.membership")

T = TypeVar("T", IngressLease, WorkerLease, EngineReport, WorkerAddress)


class Membership:
    """Renews one lease and, in an ingress, reads all of them. It passes Redis's time on to
    `clock`.
    """

    def __init__(
        self,
        link: RedisLink,
        namespace: str,
        on_change: Callable[[Members], None] | None = None,
        clock: RedisClock | None = None,
        loops: Loops | None = None,
        notices: KeyNotices | None = None,
    ) -> None:
        self._link = link
        self._notices = notices
        self._clock = clock or RedisClock()
        self._loops = loops or Loops()
        self._ingresses, self._workers = ingresses_key(namespace), workers_key(namespace)
        self._engines, self._calls = engines_key(namespace), calls_key(namespace)
        self._on_change = on_change
        self._task: asyncio.Task[None] | None = None
        self._mine: Callable[[], dict[str, str]] = dict
        """What is renewed, by its Redis key."""
        self._held: dict[str, str] = {}
        """What was renewed last."""
        self.members = Members()
        self.reachable = False
        self._trust = Trust()
        self._entrance: Entrance | None = None
        self._certain = False
        """Whether who has no lease is dead, while this ingress is not let in."""

    async def join_as_ingress(
        self, lease: Callable[[], IngressLease], entrance: Entrance | None = None
    ) -> None:
        """Keep the lease of an ingress once the entrance lets it in; each renewal calls `lease`."""
        self._entrance = entrance

        def mine() -> dict[str, str]:
            since_ms = entrance.since_ms if entrance else 0
            return {self._ingresses: lease()._replace(since_ms=since_ms).encode()}

        await self._join(mine)

    async def join_as_worker(
        self,
        replica: str,
        capacity: Callable[[EngineReport | None], int],
        report: Callable[[], EngineReport | None] = lambda: None,
        address: WorkerAddress | None = None,
    ) -> None:
        """Keep the lease of a worker; each renewal calls `report`, and with it `capacity`."""

        def mine() -> dict[str, str]:
            engine = report()
            found = {self._workers: WorkerLease(replica, capacity(engine)).encode()}
            if engine is not None:
                found[self._engines] = engine.encode()
            if address is not None:
                found[self._calls] = address.encode()
            return found

        await self._join(mine)

    async def _join(self, mine: Callable[[], dict[str, str]]) -> None:
        self._mine = mine
        await self._renew()
        self._task = self._loops.keep("membership", self._keep)

    async def leave(self) -> None:
        if self._task is not None:
            await self._loops.end(self._task)
        try:
            await self._call([("ZREM", key, member) for key, member in self._held.items()])
        except RedisUnavailable as error:
            log.warning("membership: cannot delete the lease, it will expire: %s", error)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(timings.LEASE_RENEW_S)
            await self._renew()

    async def _renew(self) -> None:
        now_s = self._clock.local.monotonic_s
        began_s, entrance = now_s(), self._entrance
        try:
            now_ms = await self._redis_ms()
            if entrance is not None and not await self._enters(entrance, now_ms):
                self.reachable = True
                self._certain = self._trust.judged(began_s, now_s(), (), ()).trusted
                return
            renewals = list(self._renewals(now_ms))
            notices = self._notices.commands(now_ms) if self._notices else []
            asked_s = now_s()
            replies = await self._call([*notices, *renewals, *self._reads(now_ms)])
        except RedisUnavailable as error:
            if self.reachable:
                log.warning("membership: %s", error)
            self.reachable = self._certain = False
            self._trust.failed()
            self._tell(replace(self.members, trusted=False, lately=frozenset()))
            return
        self.reachable = True
        if self._notices is not None:
            self._notices.answered(replies[len(notices) - 1], now_ms)
        if entrance is not None:
            entrance.answered(replies.pop())
        *_, clock, ingresses, workers, engines, addresses = replies
        self._clock.told((int(clock[0]), int(clock[1])), asked_s)
        judged = self._trust.judged(
            began_s,
            now_s(),
            _decoded(IngressLease.decode, ingresses),
            _decoded(WorkerLease.decode, workers),
        )
        reports = _decoded(EngineReport.decode, engines)
        where = _decoded(WorkerAddress.decode, addresses)
        self._tell(replace(judged, engines=reports, addresses=where))

    def _renewals(self, now_ms: int) -> Iterator[Command]:
        before, mine = self._held, self._mine()
        self._held = before | mine
        for key, member in mine.items():
            yield ("ZADD", key, now_ms + timings.LEASE_MS, member)
            if before.get(key, member) != member:
                yield ("ZREM", key, before[key])
            yield ("ZREMRANGEBYSCORE", key, "-inf", now_ms)

    def _reads(self, now_ms: int) -> Iterator[Command]:
        yield ("TIME",)
        for key in (self._ingresses, self._workers, self._engines, self._calls):
            yield ("ZRANGEBYSCORE", key, now_ms, "+inf")
        if self._entrance is not None:
            yield self._entrance.command(now_ms)

    async def _enters(self, entrance: Entrance, now_ms: int) -> bool:
        """Whether an ingress is let in, or was; it asks every time until it is."""
        if not entrance.let_in:
            (reply,) = await self._call([entrance.command(now_ms, self._certain)])
            entrance.answered(reply)
        return entrance.let_in

    async def _redis_ms(self) -> int:
        if not self._clock.known:
            asked_s = self._clock.local.monotonic_s()
            ((seconds, microseconds),) = await self._call([("TIME",)])
            self._clock.told((int(seconds), int(microseconds)), asked_s)
        return self._clock.now_ms()

    async def _call(self, commands: Sequence[Command]) -> list[Any]:
        return list(all_answered(await self._link.call(commands)))

    def _tell(self, members: Members) -> None:
        self.members = members
        if self._on_change is not None:
            self._on_change(members)


def _decoded(decode: Callable[[bytes], T], members: Iterable[bytes]) -> tuple[T, ...]:
    """The members that can be decoded, by name; one malformed member must not hide the others. They
    come by the end of their leases: a process whose renewal was cut off may have two.
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
