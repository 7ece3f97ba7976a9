"""Whether this process can use Redis, and if not, why: one sentence for an operator.

Ready means that a request would be answered. Therefore everything that a request needs of Redis is
tried, and what Redis answers is said in its own words: by `hermes-serve check-redis` and quickstart
before anything starts, and by each ingress when it starts, when Redis was lost or has refused
something, and once a minute.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import NamedTuple

from serve_app import timings
from serve_app.clock import SYSTEM, Clock
from serve_app.errors import AnswerLost, RedisRefuses, RedisUnavailable, RefusedForNow
from serve_app.loops import Loops, jittered
from serve_app.redis.configuration import warnings
from serve_app.redis.connection import Command, RespConnection, connect, tls_context
from serve_app.redis.keyspace import service_key, trial_channel, trial_key
from serve_app.redis.replies import check_passes, check_refused, owned_by_another, parse_info
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
        of_setup = (Step.TRUST, Step.AUTHENTICATE, Step.PERMISSIONS, Step.CLUSTER, Step.COMMANDS)
        return self not in of_setup

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


_TRIED = """
SELECT {db}
PING
TIME
UNLINK {keys}
EVAL return 0
EVALSHA {digest} 0
XADD {journal} 0-1 f x
XADD {journal} NOMKSTREAM 1-0 f x
PEXPIRE {journal} {ms}
XRANGE {journal} (0-1 + COUNT 1
XREVRANGE {journal} + - COUNT 1
XREAD COUNT 1 BLOCK 1 STREAMS {journal} 0-1
EXISTS {journal}
PTTL {journal}
XTRIM {journal} MINID 1-0
SET {text} x PX {ms}
SET {text} x NX PX {ms}
GET {text}
GETRANGE {text} 0 1
GETDEL {text}
MGET {text} {journal}
XADD {queue} MAXLEN 10 * f x
PEXPIRE {queue} {ms}
XGROUP CREATE {queue} g 0 MKSTREAM
XGROUP CREATE {journal} g $ MKSTREAM
XREADGROUP GROUP g c COUNT 1 BLOCK 1 STREAMS {queue} {journal} > >
XPENDING {queue} g
XPENDING {queue} g IDLE 0 - + 1 c
XLEN {queue}
XCLAIM {queue} g c 0 0-1
XACK {queue} g 0-1
XDEL {queue} 0-1
ZADD {set} 1 x
ZADD {set} LT 1 x
PEXPIRE {set} {ms}
ZCARD {set}
ZRANK {set} x
ZRANGE {set} 0 0
ZREVRANK {set} x
ZREVRANGE {set} 0 0
ZRANGEBYSCORE {set} 0 +inf LIMIT 0 1
ZREMRANGEBYRANK {set} 0 -2
ZREMRANGEBYSCORE {set} -inf 0
ZSCORE {set} x
BZPOPMIN {set} 0.01
ZPOPMIN {set}
ZREM {set} x
HINCRBY {sums} 1 1
HGETALL {sums}
HGET {sums} 1
HMGET {sums} 1 2
HSET {sums} 1 1
HDEL {sums} 1
PUBLISH {channel} x
PUBSUB NUMSUB {channel}
UNLINK {keys}
"""
"""Every command that the service sends to Redis, with the options that it uses, on keys that nobody
else uses. The tests' Redis permits its user these and no others, so none can be missing here.
"""


def trial(namespace: str, process: str, db: int) -> tuple[list[Command], list[Command]]:
    """What to send first, on a connection of its own, where the message of the one `PUBLISH` must
    arrive; and all other commands. `process` is a name that no other process uses.
    """
    parts = ("journal", "queue", "text", "set", "sums")
    keys = {part: trial_key(namespace, process, part) for part in parts}
    channel = trial_channel(namespace, process)
    digest = hashlib.sha1(b"return", usedforsecurity=False).hexdigest()
    tried = _TRIED.strip().format(
        **keys,
        keys=" ".join(keys.values()),
        db=db,
        channel=channel,
        digest=digest,
        ms=timings.REDIS_TRIAL_MS,
    )
    listening: list[Command] = [("SUBSCRIBE", channel), ("PING",)]
    return listening, [tuple(line.split(" ")) for line in tried.split("\n")]


class ValueSizes:
    """Whether Redis takes values as large as requests may be.

    Redis closes the connection of whoever sends more than its `proto-max-bulk-len` or
    `client-query-buffer-limit`, and a proxy before it may have a bound of its own. The service's
    user may not read the configuration, and only some of them say why; so a value of that size is
    sent, and asked back, on a connection of its own. Nothing is stored.
    """

    def __init__(self, settings: RedisSettings, largest_bytes: int) -> None:
        self._settings = settings
        self._largest_bytes = largest_bytes
        self._one = asyncio.Lock()
        self._looked_s = -math.inf
        self._said = ""
        self.due = True
        """Whether it may have changed what Redis takes."""
        self.refused_bytes = math.inf
        """The smallest size that was refused."""

    async def warnings(self) -> list[str]:
        """Try the largest size if that is due, and not too often."""
        now_s = SYSTEM.monotonic_s()
        self.due |= self.refused_bytes < math.inf
        if self.due and now_s - self._looked_s >= timings.REDIS_SIZES_AGAIN_S:
            self._looked_s = now_s
            with suppress(RedisUnavailable):  # else it is slow or gone, and tried a minute later
                async with self._one:
                    self._said = await self._tried(self._largest_bytes)
                self.due = False
                self.refused_bytes = self._largest_bytes if self._said else math.inf
        if not self._said:
            return []
        return [
            f"it does not take and give values of {self._largest_bytes:,} bytes, which requests "
            f"may have ({self._said}): raise its proto-max-bulk-len, client-query-buffer-limit and "
            "client-output-buffer-limit, and what a proxy before it lets pass, or lower "
            "ingress.max_body_bytes"
        ]

    async def refuses(self, size_bytes: int) -> bool:
        """Whether Redis refuses a value of this size; tries it. Raises `RedisUnavailable` if it
        cannot be told now.
        """
        async with self._one:  # a crowd of refused clients must not send everything twice at once
            if size_bytes < self.refused_bytes and (said := await self._tried(size_bytes)):
                self._said, self.refused_bytes = said, size_bytes
        return size_bytes >= self.refused_bytes

    async def _tried(self, size_bytes: int) -> str:
        """What Redis says against a value; empty if it takes it, and gives it back."""
        said = ""
        for size in (size_bytes, size_bytes, 1):  # one connection may end for another reason
            connection = await connect(self._settings)
            try:
                async with asyncio.timeout(timings.REDIS_SIZE_ANSWER_S):
                    (reply,) = await connection.call([("EVAL", "return ARGV[1]", 0, bytes(size))])
            except TimeoutError:
                raise RedisUnavailable("no answer in time") from None
            except AnswerLost:
                if size == 1:
                    raise
                said = "it closes the connection"
            else:
                if not isinstance(reply, Exception):
                    return said if size == 1 else ""
                check_passes("EVAL", str(reply))
                said = str(reply)
            finally:
                connection.abort()
        return said


class Check:
    """Tries Redis, as often as it is asked to. Of Ray's GCS, which has no `namespace`, the login is
    tried and nothing else. A `service` with a name finds that the namespace is another one's.
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
        self._namespace, self._service = namespace, service
        self.sizes = ValueSizes(self._settings, max(max_body_bytes, timings.ENTRY_BYTES))

    async def run(self) -> Finding | tuple[str, ...]:
        """Try everything once: the step that failed, or else warnings about the configuration.
        These never refuse a Redis: a pod that restarts must not stay away because of a setting.
        """
        address, file = self._settings.address, self._settings.ca_file
        try:
            if file and address.tls:
                await tls_context(file)
        except OSError as error:  # to wait for Redis would change nothing
            return Finding(Step.TRUST, f"cannot read redis.ca_file '{file}': {error}")
        try:
            return await self._resolve() or await self._try()
        except RefusedForNow as error:
            return _refused_for_now(error)
        except RedisRefuses as error:
            return _refused(error)
        except RedisUnavailable as error:
            where = address.path or ", ".join(f"{host}:{port}" for host, port in address.nodes)
            return Finding(Step.CONNECT, f"{where} does not serve: {error}".rstrip("."))

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

    async def _try(self) -> Finding | tuple[str, ...]:
        asking = await connect(self._settings)
        try:
            if self._namespace is None:
                await _ask(asking, [("EXISTS", "RAY")])
                return ()
            return await self._try_service(self._namespace, asking)
        finally:
            asking.abort()

    async def _try_service(
        self, namespace: str, asking: RespConnection
    ) -> Finding | tuple[str, ...]:
        its_name, db = secrets.token_hex(8), self._settings.address.db
        subscribing, commands = trial(namespace, its_name, db)
        delivered = asyncio.Event()
        listening = await connect(self._settings, lambda *_: delivered.set())
        try:
            await _ask(listening, subscribing)
            await _ask(asking, commands)
            async with asyncio.timeout(timings.REDIS_CHECK_ANSWER_S):
                await delivered.wait()
        except TimeoutError:
            raise RedisUnavailable("it does not deliver what is published") from None
        finally:
            listening.abort()
        wanted = [("INFO",), ("GET", service_key(namespace))]
        info, owner = await asking.ask(wanted, timings.REDIS_CHECK_ANSWER_S)
        owner = owner if isinstance(owner, bytes) else None
        if another := owned_by_another(namespace, owner, self._service):
            return Finding(Step.SERVICE, another)
        of_info = warnings(parse_info(info) if isinstance(info, bytes) else None)
        return (*of_info, *await self.sizes.warnings())


async def _ask(connection: RespConnection, commands: Sequence[Command]) -> None:
    """Send commands that Redis must all accept; raises `RedisUnavailable` if it does not,
    `RedisRefuses` if that does not pass by itself.
    """
    replies = await connection.ask(commands, timings.REDIS_CHECK_ANSWER_S)
    for command, reply in zip(commands, replies, strict=True):
        for part in reply if isinstance(reply, list) else [reply]:
            check_refused(" ".join(map(str, command[:2])), part)


log = logging.getLogger("hermes.redis")
_PROBLEMS = 16
"""So many are remembered. Redis's words may hold numbers."""


class RedisWatch:
    """The result of the last try. Once Redis is usable again, `on_usable` is called before it is
    said: who is told so has a connection.
    """

    def __init__(
        self,
        settings: RedisSettings,
        namespace: str,
        max_body_bytes: int,
        loops: Loops,
        on_usable: Callable[[], None] = lambda: None,
    ) -> None:
        self._check = Check(settings, namespace, max_body_bytes)
        self.sizes = self._check.sizes
        self._loops, self._on_usable = loops, on_usable
        self._doubted = asyncio.Event()
        self._problems = ProblemLog(log)
        self._answered_s = -math.inf
        self.untried = True
        """Whether the first try has not ended yet, so that nothing is known."""
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
        self._loops.keep("redis-check", self._keep)

    def lost(self) -> None:
        """Redis cannot be reached at the moment. What was found before no longer counts."""
        if self.usable:
            self.usable, self.sizes.due = False, True
            self._doubted.set()

    def doubt(self) -> None:
        """A request could not be accepted because of Redis: try what it takes."""
        self._doubted.set()

    async def _keep(self) -> None:
        while True:
            self._doubted.clear()
            self._found(await self._check.run())
            await asyncio.sleep(jittered(timings.REDIS_CHECK_RETRY_S))
            if self.usable:
                with suppress(TimeoutError):
                    async with asyncio.timeout(jittered(timings.REDIS_CHECK_AGAIN_S)):
                        await self._doubted.wait()

    def _found(self, found: Finding | tuple[str, ...]) -> None:
        self.untried = False
        if isinstance(found, Finding):
            self._not_usable(found)
            return
        if not self.usable:
            self._on_usable()
        self.usable, self.answer, self.refused = True, "", ""
        self._problems.usable()
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
        self._problems.problem(str(found))


class ProblemLog:
    """Logs each problem of Redis once, also if wordings alternate, and when all is over."""

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
