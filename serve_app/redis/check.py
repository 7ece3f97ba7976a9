"""Whether this process can use Redis, and if not, why: one sentence for an operator.

Ready means that a request would be answered. Therefore everything that a request needs of Redis is
tried (`trial.py`), by both clients, and what Redis answers is said in its own words: by
`hermes-serve check-redis` and quickstart before anything starts, and by each ingress while it runs.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from typing import NamedTuple

from serve_app import timings
from serve_app.clock import SYSTEM, Clock
from serve_app.errors import RedisRefuses, RedisUnavailable, RefusedForNow
from serve_app.loops import Loops, jittered
from serve_app.redis.client import connect_redis, redis_call
from serve_app.redis.connection import Command, RespConnection, connect
from serve_app.redis.keyspace import service_key
from serve_app.redis.memory import parse_info, warnings
from serve_app.redis.replies import check_refused, owned_by_another
from serve_app.redis.sizes import ValueSizes
from serve_app.redis.tls import tls_context
from serve_app.redis.trial import Trial, trial
from serve_app.settings import RedisSettings


class Step(StrEnum):
    """A step that can fail, and what to look at then."""

    RESOLVE = "check the host in the URL, and DNS"
    CONNECT = (
        "check the URL (host, port, redis:// or rediss://, the primary's name), the CA "
        "certificates, what lies between, and Redis's own log"
    )
    TRUST = "name a file of PEM certificates that this user can read"
    AUTHENTICATE = "check user and password in the URL, and Redis's ACL"
    PERMISSIONS = "check the namespace, and the user's permissions (cluster/redis.acl)"
    CLUSTER = "use one primary, and Sentinel if it has replicas (docs/redis.md)"
    CLIENTS = "raise its maxclients, or end what else is connected to it"
    PRIMARY = "check the URL (the primary's host, or its name in Sentinel)"
    COMMANDS = "check the database in the URL, and use Redis 6.2 or a later one (docs/redis.md)"
    SERVICE = "choose another namespace; this one is free a minute after that service has ended"
    STATE = "see to what it says, such as memory, replicas or the disk (docs/redis.md)"

    @property
    def passes(self) -> bool:
        """Whether it may succeed later, because Redis or the network is only late."""
        return self in (
            Step.RESOLVE,
            Step.CONNECT,
            Step.CLIENTS,
            Step.PRIMARY,
            Step.SERVICE,
            Step.STATE,
        )

    @property
    def answered(self) -> bool:
        """Whether Redis itself has said what is wrong."""
        return self not in (Step.RESOLVE, Step.CONNECT)


class Finding(NamedTuple):
    """The first step that failed. Holds no password."""

    step: Step
    what: str

    def __str__(self) -> str:
        return f"{self.what}; {self.step}"


_REPLICA = ("READONLY ", "MASTERDOWN ")
_CLUSTER = ("CROSSSLOT ", "MOVED ", "ASK ", "CLUSTERDOWN ")
_LOGIN = ("WRONGPASS ", "NOAUTH ")


def _refused(error: RedisRefuses) -> Finding:
    answer = error.answer
    if answer.startswith(_CLUSTER) or "cluster mode" in answer:
        return Finding(Step.CLUSTER, f"Redis Cluster is not supported: {answer}")
    if answer.startswith("DENIED "):  # its protected mode
        return Finding(Step.AUTHENTICATE, f"it refuses {error.what}: {answer}")
    if answer.startswith(_LOGIN) or error.what == "AUTH":
        return Finding(Step.AUTHENTICATE, f"it rejects user and password: {answer}")
    step = Step.PERMISSIONS if "NOPERM " in answer else Step.COMMANDS
    return Finding(step, f"it refuses {error.what}: {answer}")


def _refused_for_now(error: RefusedForNow) -> Finding:
    answer = error.answer.rstrip(".")  # and not what it refuses: that differs from try to try
    if error.what == RefusedForNow.CLIENTS:
        return Finding(Step.CLIENTS, f"it refuses {error.what} for now: {answer}")
    if answer.startswith(_REPLICA):
        return Finding(Step.PRIMARY, f"it is a replica, and takes no writes: {answer}")
    return Finding(Step.STATE, f"it refuses commands for now: {answer}")


class Check:
    """Tries Redis again and again, on connections that it keeps.

    Args:
        namespace: of the service; None for Ray's GCS, whose login is tried and nothing else.
        max_body_bytes: of a request.
        service: its name, to find that the namespace belongs to another one; empty if that is not
            to be found here.
    """

    def __init__(
        self,
        settings: RedisSettings,
        namespace: str | None,
        max_body_bytes: int,
        service: str = "",
    ) -> None:
        patience_s = max(settings.connect_timeout_s, timings.REDIS_CHECK_ANSWER_S)
        self._settings = settings.model_copy(update={"connect_timeout_s": patience_s})
        self._trial = (
            Trial([], [("EXISTS", "RAY")])
            if namespace is None
            else trial(namespace, secrets.token_hex(8), settings.address.db)
        )
        self._of_service = namespace is not None
        self._namespace, self._service = namespace or "", service
        largest_bytes = max(max_body_bytes, timings.ENTRY_BYTES)
        self.sizes = ValueSizes(self._settings, largest_bytes)
        self._connections: list[RespConnection] = []
        self._delivered = asyncio.Event()

    async def run(self) -> Finding | tuple[str, ...]:
        """Try everything once.

        Returns:
            The step that failed; or else warnings about the configuration. These never refuse a
            Redis: a pod that restarts must not stay away because of a setting.
        """
        try:
            kept = bool(self._connections) and all(one.usable for one in self._connections)
            if not kept:
                if missing := await self._unreadable() or await self._resolve():
                    return missing
                await self._connect()
            found = await self._try()
            if isinstance(found, Finding) or not self._of_service:
                return found
            if not kept:
                async with connect_redis(self._settings, timings.REDIS_CHECK_ANSWER_S) as redis:
                    await redis_call(redis.ping)  # the other client connects as well
            return (*found, *await self.sizes.warnings(anew=not kept))
        except RedisUnavailable as error:
            self.close()  # a transaction may be open there
            if isinstance(error, RefusedForNow):
                return _refused_for_now(error)
            return _refused(error) if isinstance(error, RedisRefuses) else self._late(error)

    def close(self) -> None:
        """Close the connections; the next run opens others."""
        for connection in self._connections:
            connection.abort()
        self._connections = []

    async def _unreadable(self) -> Finding | None:
        """Whether the CA certificates cannot be loaded: to wait for Redis would change nothing."""
        file = self._settings.ca_file
        try:
            if file and self._settings.address.tls:
                await tls_context(file)
        except OSError as error:
            return Finding(Step.TRUST, f"cannot read redis.ca_file '{file}': {error}")
        return None

    async def _resolve(self) -> Finding | None:
        """Resolve the names. Of several Sentinels, one is enough."""
        found: Finding | None = None
        for host, port in self._settings.address.nodes:
            try:
                async with asyncio.timeout(timings.REDIS_CHECK_NAME_S):
                    await asyncio.get_running_loop().getaddrinfo(host, port)
                return None
            except (socket.gaierror, TimeoutError) as error:
                said = error.strerror or "no answer"
                found = Finding(Step.RESOLVE, f"DNS has no address for '{host}' ({said})")
        return found

    async def _connect(self) -> None:
        self.close()
        for on_push in (None, lambda *_: self._delivered.set()):
            self._connections.append(await connect(self._settings, on_push))

    async def _try(self) -> Finding | tuple[str, ...]:
        asking, listening = self._connections
        self._delivered.clear()
        await _ask(listening, self._trial.listening)
        await _ask(asking, self._trial.commands)
        if not self._of_service:
            return ()
        try:
            async with asyncio.timeout(timings.REDIS_CHECK_ANSWER_S):
                await self._delivered.wait()
        except TimeoutError:
            raise RedisUnavailable("it does not deliver what is published") from None
        wanted = [("INFO",), ("GET", service_key(self._namespace))]
        info, owner = await asking.ask(wanted, timings.REDIS_CHECK_ANSWER_S)
        owner = owner if isinstance(owner, bytes) else None
        if another := owned_by_another(self._namespace, owner, self._service):
            return Finding(Step.SERVICE, another)
        return tuple(warnings(parse_info(info) if isinstance(info, bytes) else None))

    def _late(self, error: RedisUnavailable) -> Finding:
        address = self._settings.address
        where = address.path or ", ".join(f"{host}:{port}" for host, port in address.nodes)
        return Finding(Step.CONNECT, f"{where} does not serve: {error}".rstrip("."))


async def _ask(connection: RespConnection, commands: Sequence[Command]) -> None:
    """Send commands that Redis must all accept.

    Raises:
        RedisUnavailable: it does not; `RedisRefuses` if that does not pass by itself.
    """
    if not commands:
        return
    replies = await connection.ask(commands, timings.REDIS_CHECK_ANSWER_S)
    for command, reply in zip(commands, replies, strict=True):
        for part in reply if isinstance(reply, list) else [reply]:
            check_refused(" ".join(map(str, command[:2])), part)


log = logging.getLogger("hermes.redis")
_PROBLEMS = 16
"""So many are remembered. Redis's words may hold numbers."""


class RedisWatch:
    """The result of the last try."""

    def __init__(
        self, settings: RedisSettings, namespace: str, max_body_bytes: int, loops: Loops
    ) -> None:
        self._check = Check(settings, namespace, max_body_bytes)
        self.sizes = self._check.sizes
        self._loops = loops
        self._task: asyncio.Task[None] | None = None
        self._again = asyncio.Event()
        self._anew = False
        self._told = Told(log)
        self._answered_s = -math.inf
        self.usable = False
        """Whether everything was possible, and Redis has not been lost since."""
        self.answer = ""
        """Why not, in Redis's own words, and what to look at; empty if it has said nothing."""
        self.refused = ""
        """The same, if waiting does not help, or if Redis takes no other client: then what is
        accepted would wait for a connection.
        """
        self.warnings: tuple[str, ...] = ()
        """What is wrong with Redis's configuration, for its operator."""

    async def start(self) -> None:
        self._task = self._loops.keep("redis-check", self._keep)

    async def stop(self) -> None:
        if self._task is not None:
            await self._loops.end(self._task)
        self._check.close()

    def lost(self) -> None:
        """Redis cannot be reached at the moment. What was found before no longer counts."""
        if self.usable:
            self.usable = False
            self._anew = True
            self._again.set()

    async def _keep(self) -> None:
        while True:
            self._again.clear()
            if self._anew:  # who has lost it may need a connection, too
                self._check.close()
                self._anew = False
            self._found(await self._check.run())
            late = not self.usable and not self.refused
            pause_s = timings.REDIS_CHECK_RETRY_S if late else timings.REDIS_CHECK_AGAIN_S
            with suppress(TimeoutError):
                async with asyncio.timeout(jittered(pause_s)):
                    await self._again.wait()

    def _found(self, found: Finding | tuple[str, ...]) -> None:
        if isinstance(found, Finding):
            self._not_usable(found)
            return
        self.usable, self.answer, self.refused = True, "", ""
        self._told.usable()
        for warning in found:
            if warning not in self.warnings:
                log.warning("Redis: %s", warning)
        self.warnings = found

    def _not_usable(self, found: Finding) -> None:
        self.usable = False
        now_s = SYSTEM.monotonic_s()
        if found.step.answered:
            self._answered_s, self.answer = now_s, str(found)
        elif now_s - self._answered_s < timings.REDIS_ANSWER_COUNTS_S:
            return  # of connections that it closes, not every one hears why
        else:
            self.answer = ""
        lasting = not found.step.passes or found.step is Step.CLIENTS
        self.refused = self.answer if lasting else ""
        self._told.problem(str(found))


class Told:
    """Logs what is wrong with Redis, once for each problem, and when it is over. An outage whose
    wordings alternate, or that comes and goes, is not logged with each of them.
    """

    def __init__(self, log: logging.Logger, clock: Clock = SYSTEM) -> None:
        self._log, self._clock = log, clock
        self._at_s: dict[str, float] = {}
        """When each problem was logged last."""
        self._began_s = math.inf
        """When the outage began of which the log tells; infinite if there is none."""

    def problem(self, what: str) -> None:
        now_s = self._clock.monotonic_s()
        last_s = self._at_s.get(what, -math.inf)
        if last_s >= self._began_s or now_s - last_s < timings.REDIS_TELL_AGAIN_S:
            return
        if len(self._at_s) >= _PROBLEMS:
            self._at_s.clear()
        self._began_s = min(self._began_s, now_s)
        self._at_s[what] = now_s
        self._log.warning("Redis cannot be used: %s", what)

    def usable(self) -> None:
        if self._began_s < math.inf:
            self._began_s = math.inf
            self._log.info("Redis: usable")
