"""Whether this process can use Redis, and if not, why: one sentence for an operator.

The service itself waits for a Redis that it cannot reach, and Ray's GCS ends with a stack trace.
Neither says whether the name, the way, the login or the settings are wrong. So each step is tried
by itself: the name, the connection, the login, the permissions, the settings.
"""

from __future__ import annotations

import asyncio
import errno
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.connection import parse_url
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    NoPermissionError,
    RedisError,
    ResponseError,
)

from serve_app import timings
from serve_app.redis.client import connect_redis, redis_call
from serve_app.redis.finding import Finding, Trouble, Usable
from serve_app.redis.keyspace import ingresses_key
from serve_app.redis.memory import Memory
from serve_app.settings import RedisSettings
from serve_app.settings.redis_address import is_tls, sentinel_address


async def check_service(settings: RedisSettings, namespace: str) -> Finding | Usable:
    """Try everything that the service's user needs.

    Settings that lose requests are only a warning: a pod that restarts must not stay away because
    of a setting.
    """
    if unreachable := await _reach(settings):
        return unreachable
    async with connect_redis(settings, timings.REDIS_CHECK_ANSWER_S) as redis:
        try:
            await redis.exists(ingresses_key(namespace))
        except (RedisError, OSError) as error:
            return _failed(error, settings, f"the keys of the namespace '{namespace}'")
        return _judged(await _info(redis))


async def check_gcs(settings: RedisSettings) -> Finding | Usable:
    """Try what the user of Ray's GCS needs."""
    if unreachable := await _reach(settings):
        return unreachable
    async with connect_redis(settings, timings.REDIS_CHECK_ANSWER_S) as redis:
        try:
            await redis.exists("RAY")
        except (RedisError, OSError) as error:
            return _failed(error, settings, "keys that begin with 'RAY'")
    return Usable()


async def _reach(settings: RedisSettings) -> Finding | None:
    """Resolve the names and connect. Of several Sentinels, one is enough."""
    found: Finding | None = None
    for host, port in _addresses(settings.url):
        found = await _reach_one(host, port)
        if found is None:
            return None
    return found


def _addresses(url: str) -> list[tuple[str, int]]:
    """What the client connects to first; empty for a Unix socket."""
    if sentinels := sentinel_address(url):
        return list(sentinels.nodes)
    target: Mapping[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
    if "path" in target:
        return []
    return [(target.get("host", "localhost"), target.get("port", 6379))]


async def _reach_one(host: str, port: int) -> Finding | None:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timings.REDIS_CHECK_NAME_S):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except TimeoutError:
        return _no_dns(host)
    except socket.gaierror as error:
        if error.errno == socket.EAI_AGAIN:
            return _no_dns(host)
        return Finding(Trouble.NAME, f"DNS knows no host '{host}'")
    address = found[0][4][0]
    where = f"{host}:{port}" if host == address else f"{host}:{port} ({address})"
    try:
        async with asyncio.timeout(timings.REDIS_CHECK_ANSWER_S):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return Finding(Trouble.REFUSED, f"{where} refuses connections: no Redis listens there")
    except OSError as error:  # TimeoutError is one
        why = errno.errorcode.get(error.errno or 0, "no answer")
        return Finding(Trouble.SILENT, f"{where} cannot be reached ({why})")
    writer.close()
    return None


def _no_dns(host: str) -> Finding:
    asked = re.findall(r"^nameserver\s+(\S+)", _read("/etc/resolv.conf"), re.MULTILINE)
    servers = ", ".join(asked) or "none"
    return Finding(
        Trouble.DNS,
        f"DNS does not answer for '{host}' (nameservers in /etc/resolv.conf: {servers})",
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _failed(error: Exception, settings: RedisSettings, keys: str) -> Finding:
    """Why Redis did not execute the first command, although a connection could be opened."""
    said = str(error) or type(error).__name__
    if isinstance(error, NoPermissionError):
        return Finding(Trouble.PERMISSION, f"its user may not use {keys}: {said}")
    if isinstance(error, AuthenticationError) or said.startswith("NOAUTH"):
        return Finding(Trouble.LOGIN, f"it rejects user and password: {said}")
    if isinstance(error, BusyLoadingError):
        return Finding(Trouble.BUSY, f"it is still reading its append-only file: {said}")
    if isinstance(error, ResponseError):
        return Finding(Trouble.BUSY, f"it does not serve: {said}")
    if is_tls(settings.url) and "CERTIFICATE_VERIFY_FAILED" in said:
        return Finding(Trouble.TLS, f"its certificate is not trusted: {said}")
    if is_tls(settings.url) and ("SSL" in said or "Timeout connecting" in said):
        return Finding(
            Trouble.TLS,
            "it does not answer the TLS handshake, as a port does that speaks no TLS, but the URL "
            f"begins with rediss: {said}",
        )
    if "No master found" in said:
        return Finding(Trouble.SENTINEL, f"no Sentinel knows the primary: {said}")
    if not is_tls(settings.url) and _cut(said):
        return Finding(
            Trouble.TLS,
            "it ends the connection at the first command, as a port does that speaks TLS, but the "
            f"URL begins with redis: {said}",
        )
    return Finding(Trouble.SILENT, f"it does not answer: {said}")


def _cut(said: str) -> bool:
    return "Connection closed by server" in said or "reset by peer" in said


async def _info(redis: Redis) -> Mapping[str, Any] | None:
    """What Redis tells about itself; None if this user may not ask, or it does not answer."""
    try:
        told: Mapping[str, Any] = await redis.info()
    except (RedisError, OSError):
        return None
    return told


def _judged(info: Mapping[str, Any] | None) -> Finding | Usable:
    if info is None:
        return Usable(("it does not tell its settings (INFO), so nobody has checked them",))
    if info.get("role", "master") != "master":
        return Finding(Trouble.BUSY, "it is a replica, and takes no writes")
    wrong = _forgets(info)
    if "used_memory" in info:
        wrong += Memory.from_info(info).wrong_settings()
    return Usable(tuple(wrong))


async def what_it_forgets(redis: Redis) -> list[str]:
    """With which settings Redis loses what it has accepted, each as a sentence for its operator;
    none if this user may not ask. How full it may be is looked at all the time (`memory.py`).

    Raises:
        RedisUnavailable: Redis cannot be reached.
    """

    async def ask() -> Mapping[str, Any]:
        with suppress(NoPermissionError):
            told: Mapping[str, Any] = await redis.info("persistence")
            return told
        return {}

    return _forgets(await redis_call(ask))


def _forgets(info: Mapping[str, Any]) -> list[str]:
    if int(info.get("aof_enabled", 1)):
        return []
    return ["appendonly is no, so a restart loses every request: set it to yes"]
