"""Which processes are alive, and their capacity: leases in Redis, renewed twice a second, and what
goes with each renewal.

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
from serve_app.cluster.members import Members, Trust
from serve_app.contract import EngineReport, IngressLease, WorkerAddress, WorkerLease
from serve_app.errors import RedisUnavailable
from serve_app.loops import Loops
from serve_app.redis.connection import Command
from serve_app.redis.keyspace import (
    calls_key,
    cluster_key,
    engines_key,
    ingresses_key,
    key_uses_key,
    models_key,
    revoked_key,
    service_key,
    workers_key,
)
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import all_answered, owned_by_another

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


# -- the namespace ---------------------------------------------------------------------------------

_ENTER = """
local held, mine, how = redis.call('GET', KEYS[1]), ARGV[1], ARGV[2]
if mine ~= '' and (held == mine or (not held and how ~= 'wait')) then
  redis.call('SET', KEYS[1], mine, 'PX', ARGV[3])
  held = mine
end
if mine ~= '' and held ~= mine and how ~= 'stay' then return {held or ''} end
redis.call('SET', KEYS[2], ARGV[4], 'NX', 'PX', ARGV[5])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
redis.call('ZADD', KEYS[3], ARGV[6], ARGV[7])
local unserved = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', ARGV[8], 'LIMIT', 0, ARGV[9])
return {held or '', redis.call('GET', KEYS[2]), unserved}
"""
"""KEYS: the service, this Ray cluster, the models. ARGV: the service's name; `try`, `wait` (take no
name that is free) or `stay`; its lifetime in ms; since when the Ray cluster is there, unless Redis
knows, and how long it knows that; the time now; the model; a time, and how many models to name that
nobody has served since then. Returns the name of the namespace's service; if the ingress may be
there, also since when its Ray cluster is, and those models.
"""

_MODELS_AT_ONCE = 32


class Entrance:
    """How an ingress enters its namespace, and stays there: one script, sent with every renewal of
    its lease, says which service the namespace belongs to, since when this Ray cluster is there,
    and which models are served.

    Redis decides who of two services that start at the same time is let in. The other one is told
    nothing of the members and takes no lease: it claims nothing, and answers nothing. If `service`
    is empty, the namespace may be anybody's.
    """

    def __init__(self, namespace: str, service: str, cluster: str, model: str) -> None:
        self._namespace = namespace
        self._service = service
        self._model = model
        cluster_at = cluster_key(namespace, cluster)
        self._keys = (service_key(namespace), cluster_at, models_key(namespace))
        self.let_in = False
        """Whether it may claim and answer. Whoever was let in stays: to end a service that runs
        because of another one's settings would be worse than two in one namespace.
        """
        self.refused = ""
        """Why it is not let in, in a sentence."""
        self.warnings: tuple[str, ...] = ()
        self.since_ms = 0
        """When its Ray cluster entered the namespace, by Redis's clock in Unix milliseconds."""
        self.unserved: tuple[str, ...] = ()
        """Models that no ingress (of this version or a later one) has served lately."""

    def command(self, now_ms: int, certain: bool = False) -> Command:
        """What asks Redis. `certain`: whether a service whose name has gone is dead. After an
        outage of Redis it may only have been unable to renew it.
        """
        how = "stay" if self.let_in else "wait" if self.refused and not certain else "try"
        gone_ms = now_ms - timings.MODEL_GONE_MS
        return (
            *("EVAL", _ENTER, len(self._keys), *self._keys),
            *(self._service, how, timings.SERVICE_KNOWN_MS),
            *(self.since_ms or now_ms, timings.CLUSTER_KNOWN_MS),
            *(now_ms, self._model, gone_ms, _MODELS_AT_ONCE),
        )

    def answered(self, reply: list[Any]) -> None:
        another = owned_by_another(self._namespace, reply[0], self._service)
        if len(reply) == 1:
            said = self.refused
            if another:
                after_s = timings.SERVICE_KNOWN_MS // 1000
                self.refused = (
                    f"{another}: choose another namespace; this one is free {after_s} s after the "
                    "last ingress of that service has ended"
                )
            if self.refused != said:
                log.error("membership: not let in: %s", self.refused)
            return
        _, since, unserved = reply
        if self.refused:
            log.info("membership: let in")
        self.let_in, self.refused = True, ""
        self.since_ms = int(since) if since.isdigit() else 0
        self.unserved = tuple(model.decode(errors="replace") for model in unserved)
        warnings = (f"{another}: each answers the other's requests",) if another else ()
        if warnings and warnings != self.warnings:
            log.warning("membership: %s", warnings[0])
        self.warnings = warnings


# -- API keys --------------------------------------------------------------------------------------

MAX_REVOKED = 10_000
MAX_USES = 100_000
_USES_AT_ONCE = 1_000


def revoke(namespace: str, digest: bytes, now_ms: int) -> list[Command]:
    """What refuses a key, by its SHA-256, at every ingress. `now_ms`: by Redis's clock."""
    key = revoked_key(namespace)
    return [
        ("ZADD", key, now_ms + timings.REVOKED_MS, digest),
        ("ZREMRANGEBYSCORE", key, "-inf", now_ms),
        ("ZREMRANGEBYRANK", key, 0, -MAX_REVOKED - 1),
    ]


def last_uses(namespace: str) -> Command:
    """What asks for all keys that were used, by their ids, with Unix seconds as scores."""
    return ("ZRANGEBYSCORE", key_uses_key(namespace), "-inf", "+inf", "WITHSCORES")


def scored(reply: Sequence[bytes]) -> dict[bytes, int]:
    """A reply `WITHSCORES`."""
    return {member: int(float(score)) for member, score in zip(*[iter(reply)] * 2, strict=True)}


class KeyNotices:
    """What an ingress and the others tell each other of API keys: which were revoked, and when each
    was used last. A file of keys may take a minute to reach a node, as a Secret of Kubernetes does,
    so whoever revokes a key also adds its digest to the sorted set `{ns}:revoked`.
    """

    def __init__(self, namespace: str) -> None:
        self._revoked_at, self._uses_at = revoked_key(namespace), key_uses_key(namespace)
        self._revoked: dict[bytes, int] = {}
        """Until when each is refused, in Unix milliseconds."""
        self._used_s: dict[str, int] = {}

    def is_revoked(self, digest: bytes) -> bool:
        return digest in self._revoked

    def used(self, key_id: str, now_s: float) -> None:
        if key_id in self._used_s or len(self._used_s) < _USES_AT_ONCE:
            self._used_s[key_id] = int(now_s)

    def commands(self, now_ms: int) -> list[Command]:
        """What tells and asks Redis; call `answered` with the last reply."""
        found: list[Command] = []
        if self._used_s:
            uses = [word for name, at_s in self._used_s.items() for word in (at_s, name)]
            found.append(("ZADD", self._uses_at, "GT", *uses))
            found.append(("ZREMRANGEBYRANK", self._uses_at, 0, -MAX_USES - 1))
            self._used_s = {}
        since_ms = max(now_ms, max(self._revoked.values(), default=0) - timings.REVOKED_LATE_MS)
        where = (self._revoked_at, since_ms, "+inf", "WITHSCORES", "LIMIT", 0, MAX_REVOKED)
        return [*found, ("ZRANGEBYSCORE", *where)]

    def answered(self, reply: Any, now_ms: int) -> None:
        kept = {digest: end_ms for digest, end_ms in self._revoked.items() if end_ms > now_ms}
        self._revoked = kept | scored(reply)
