"""redis-py for everything except the hot paths: leases, measurements."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from serve_app.errors import RedisUnavailable
from serve_app.redis.sentinel import said, sentinel_client
from serve_app.settings import RedisSettings

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
        return primary
    if address.path:
        arguments["unix_socket_path"] = address.path
    else:
        ((arguments["host"], arguments["port"]),) = address.nodes
    arguments |= {"db": address.db, **address.login}
    if address.tls:
        arguments |= {"ssl": True, "ssl_ca_certs": settings.ca_file or None}
    return Redis(**arguments)


async def redis_call(call: Callable[[], Awaitable[T]]) -> T:
    """Run a redis-py call; every way of not getting an answer raises the same exception.

    Raises:
        RedisUnavailable: Redis is unreachable, loading or full, or the command failed.
    """
    try:
        return await call()
    except (RedisError, OSError) as error:
        raise RedisUnavailable(f"Redis: {said(error)}") from None
