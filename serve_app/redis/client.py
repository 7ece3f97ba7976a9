"""redis-py for everything except the hot paths and the queue: leases, metrics, the lock, and
Sentinels, which are asked for the primary whenever a connection is opened.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from redis.asyncio import Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelManagedSSLConnection
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from serve_app import timings
from serve_app.errors import RedisUnavailable
from serve_app.redis.replies import check_passes
from serve_app.redis.tls import tls_context
from serve_app.settings import RedisSettings

_CLIENT = re.compile(
    r"<redis\.asyncio\.client\.Redis\(.*?host=(\S+?),port=(\d+).*?>\)>\)> - (network:)?"
)


_OF_PIPELINE = re.compile(
    r"""Command # \d+ \(.*\) of pipeline caused error: \(["'](.*)["'],\)""", re.DOTALL
)


def said(error: Exception) -> str:
    """What Redis says, with its code (such as OOM), which redis-py may have cut off and put apart;
    or else what redis-py says, with the Sentinels' addresses in place of its clients' inner lives.
    """
    code = getattr(error, "status_code", None)
    words = _OF_PIPELINE.sub(r"\1", str(error))
    words = _CLIENT.sub(r"\1:\2 ", words) or type(error).__name__
    return f"{code} {words}" if code and not words.startswith(code) else words


class _Tls(SSLConnection):
    """Uses the context that all connections share, which redis-py makes anew for each."""

    async def _connect(self) -> None:
        self.ssl_context.context = await tls_context(self.ssl_context.ca_certs or "")
        await super()._connect()  # type: ignore[no-untyped-call]


class _TlsToPrimary(_Tls, SentinelManagedSSLConnection):
    """The same, to where the Sentinels say."""


def _sharing(client: Redis, connection: type[_Tls]) -> Redis:
    """Have a client open such connections, if it uses TLS."""
    if issubclass(client.connection_pool.connection_class, SSLConnection):
        client.connection_pool.connection_class = connection
    return client


def sentinel_client(settings: RedisSettings, **of_primary: Any) -> Sentinel:
    """redis-py's client of the Sentinels. `of_primary` holds arguments for the connections to the
    primary.
    """
    address = settings.address
    tls: dict[str, Any] = (
        {"ssl": True, "ssl_ca_certs": settings.ca_file or None} if address.tls else {}
    )
    asked: dict[str, Any] = {
        "socket_timeout": timings.SENTINEL_ANSWER_S,
        "socket_connect_timeout": timings.SENTINEL_ANSWER_S,
        "protocol": 2,
    }
    asked["retry"] = Retry(
        NoBackoff(), 0
    )  # asking the next Sentinel is better than asking the same one again
    client = Sentinel(  # type: ignore[no-untyped-call]
        list(address.nodes),
        sentinel_kwargs={**asked, **tls, **address.own_login},
        db=address.db,
        **tls,
        **address.login,
        **of_primary,
    )
    for sentinel in client.sentinels:
        _sharing(sentinel, _Tls)
    return client


async def find_primary(settings: RedisSettings) -> tuple[str, int]:
    """Host and port of the primary.

    Raises:
        redis.exceptions.ConnectionError: no Sentinel answers, or none knows a living primary of
            that name.
    """
    client = sentinel_client(settings)
    try:
        host, port = await client.discover_master(settings.address.primary)
        return str(host), int(port)
    finally:
        for sentinel in client.sentinels:
            await sentinel.aclose()


T = TypeVar("T")


def connect_redis(settings: RedisSettings, within_s: float = math.inf) -> Redis:
    """The redis-py client of this process. It retries once silently, which covers pooled
    connections that were cut by a restart of Redis.

    Args:
        within_s: a time limit for every answer, lower than the one in the settings.
    """
    arguments: dict[str, Any] = {
        "protocol": 2,
        "decode_responses": False,
        "socket_connect_timeout": settings.connect_timeout_s,
        "socket_timeout": min(settings.response_timeout_s, within_s),
        "retry": Retry(NoBackoff(), 1),
        "retry_on_error": [RedisConnectionError],
    }
    address = settings.address
    if address.primary:
        primary: Redis = sentinel_client(settings, **arguments).master_for(address.primary)
        return _sharing(primary, _TlsToPrimary)
    if address.path:
        arguments["unix_socket_path"] = address.path
    else:
        ((arguments["host"], arguments["port"]),) = address.nodes
    arguments |= {"db": address.db, **address.login}
    if address.tls:
        arguments |= {"ssl": True, "ssl_ca_certs": settings.ca_file or None}
    return _sharing(Redis(**arguments), _Tls)


async def redis_call(call: Callable[[], Awaitable[T]]) -> T:
    """Run a redis-py call; every way of not getting an answer raises the same exception.

    Raises:
        RedisUnavailable: Redis is unreachable, or the command failed; `RefusedForNow` if it is
            loading, full or the like.
    """
    try:
        return await call()
    except (RedisError, OSError) as error:
        words = said(error)
        check_passes("a command", words)
        raise RedisUnavailable(f"Redis: {words}") from None
