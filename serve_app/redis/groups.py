"""Consumer groups of streams, and how a missing stream or group is handled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from serve_app.redis.client import redis_call


class GroupGone(Exception):
    """The stream or its group does not exist (any more): Redis came back empty."""


async def create_group(redis: Redis, stream: str, group: str) -> None:
    """Create a group that reads a stream from its beginning, and the stream; both may exist.

    Raises:
        RedisUnavailable: Redis cannot be reached.
    """

    async def create() -> None:
        try:
            await redis.xgroup_create(stream, group, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    await redis_call(create)


async def read_group(
    redis: Redis,
    group: str,
    consumer: str,
    streams: Sequence[str],
    count: int,
    block_ms: int | None,
) -> Any:
    """Claim up to `count` new entries of each stream. `block_ms`: wait for the first one.

    Raises:
        GroupGone: a stream or its group does not exist.
        RedisUnavailable: Redis cannot be reached.
    """
    wanted: Any = dict.fromkeys(streams, ">")

    async def read() -> Any:
        try:
            return await redis.xreadgroup(group, consumer, wanted, count=count, block=block_ms)
        except ResponseError as error:
            if str(error).startswith("NOGROUP"):
                raise GroupGone from None
            raise

    return await redis_call(read)
