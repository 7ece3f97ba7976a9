"""Consumer groups of streams."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from serve_app.redis.client import redis_call


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
