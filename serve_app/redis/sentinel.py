"""Asks Redis Sentinel for the primary whenever a connection is opened."""

from __future__ import annotations

import re
from typing import Any

from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from serve_app import timings
from serve_app.settings import RedisSettings

_CLIENT = re.compile(
    r"<redis\.asyncio\.client\.Redis\(.*?host=(\S+?),port=(\d+).*?>\)>\)> - (network:)?"
)


def said(error: Exception) -> str:
    """What redis-py says, with the Sentinels' addresses in place of its clients' inner lives."""
    return _CLIENT.sub(r"\1:\2 ", str(error)) or type(error).__name__


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
    return Sentinel(  # type: ignore[no-untyped-call]
        list(address.nodes),
        sentinel_kwargs={**asked, **tls, **address.own_login},
        db=address.db,
        **tls,
        **address.login,
        **of_primary,
    )


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
