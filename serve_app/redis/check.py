"""Whether this process can use Redis, and if not, why: one sentence for an operator.

The service itself waits for a Redis that it cannot reach, and Ray's GCS ends with a stack trace.
Neither says what is wrong. So each step is tried in turn: resolve the name, connect, authenticate,
use the keys, look at the configuration.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.connection import parse_url
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from serve_app import timings
from serve_app.redis.client import connect_redis, redis_call
from serve_app.redis.memory import Memory
from serve_app.settings import RedisSettings
from serve_app.settings.redis_address import sentinel_address


class Step(StrEnum):
    """A step that can fail, and what to look at then."""

    RESOLVE = "check the host in the URL, and DNS"
    CONNECT = (
        "check the URL (host, port, redis:// or rediss://, the primary's name), the CA "
        "certificates, what lies between, and Redis's own log"
    )
    AUTHENTICATE = "check user and password in the URL, and Redis's ACL"
    PERMISSIONS = "check the namespace, and the user's permissions (cluster/redis.acl)"

    @property
    def passes(self) -> bool:
        """Whether it may succeed later, because Redis or the network is only late."""
        return self in (Step.RESOLVE, Step.CONNECT)


class Finding(NamedTuple):
    """The first step that failed. Holds no password."""

    step: Step
    what: str


async def check(
    settings: RedisSettings, key: str, of_service: bool = True
) -> Finding | tuple[str, ...]:
    """Try everything that a user of Redis needs.

    Args:
        key: one that the user must be allowed to use.
        of_service: whether the service writes there, so that the configuration matters.

    Returns:
        The step that failed; or else warnings about the configuration. These never refuse a Redis:
        a pod that restarts must not stay away because of a setting.
    """
    if unresolved := await _resolve(settings.url):
        return unresolved
    async with connect_redis(settings, timings.REDIS_CHECK_ANSWER_S) as redis:
        try:
            await redis.exists(key)
            info = await _info(redis) if of_service else {}
        except (RedisError, OSError) as error:
            return _failed(error, settings.url, key)
    if info.get("role", "master") != "master":
        return Finding(Step.CONNECT, "it is a replica, and takes no writes")
    memory = Memory.from_info(info).wrong_settings() if "used_memory" in info else ()
    return (*_forgets(info), *memory)


async def what_it_forgets(redis: Redis) -> tuple[str, ...]:
    """With which settings Redis loses what it has accepted, each as a sentence for its operator;
    none if this user may not ask. How full it may be is looked at all the time (`memory.py`).

    Raises:
        RedisUnavailable: Redis cannot be reached.
    """
    return _forgets(await redis_call(lambda: _info(redis, "persistence")))


def _nodes(url: str) -> list[tuple[str, int]]:
    """What the client connects to first; empty for a Unix socket."""
    if sentinels := sentinel_address(url):
        return list(sentinels.nodes)
    target: Mapping[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
    if "path" in target:
        return []
    return [(target.get("host", "localhost"), target.get("port", 6379))]


async def _resolve(url: str) -> Finding | None:
    """Resolve the names. Of several Sentinels, one is enough."""
    found: Finding | None = None
    for host, port in _nodes(url):
        try:
            async with asyncio.timeout(timings.REDIS_CHECK_NAME_S):
                await asyncio.get_running_loop().getaddrinfo(host, port)
            return None
        except (socket.gaierror, TimeoutError) as error:
            said = error.strerror or "no answer"
            found = Finding(Step.RESOLVE, f"DNS has no address for '{host}' ({said})")
    return found


def _failed(error: Exception, url: str, key: str) -> Finding:
    said = str(error).rstrip(".") or type(error).__name__
    if isinstance(error, NoPermissionError):
        return Finding(Step.PERMISSIONS, f"its user may not use '{key}': {said}")
    if isinstance(error, AuthenticationError) or said.startswith("NOAUTH"):
        return Finding(Step.AUTHENTICATE, f"it rejects user and password: {said}")
    where = ", ".join(f"{host}:{port}" for host, port in _nodes(url))
    return Finding(Step.CONNECT, f"{where or 'the socket'} does not serve: {said}")


async def _info(redis: Redis, *section: str) -> Mapping[str, Any]:
    """What Redis tells about itself; nothing if this user may not ask."""
    try:
        told: Mapping[str, Any] = await redis.info(*section)
    except NoPermissionError:
        return {}
    return told


def _forgets(info: Mapping[str, Any]) -> tuple[str, ...]:
    if int(info.get("aof_enabled", 1)):
        return ()
    return ("appendonly is no, so a restart loses every request: set it to yes",)
