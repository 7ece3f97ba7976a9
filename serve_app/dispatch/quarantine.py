"""Requests that have killed engines run one at a time, so that an innocent request is not blamed
for another one's crash.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from redis.asyncio import Redis

from serve_app import timings
from serve_app.errors import RedisUnavailable
from serve_app.redis.client import redis_call
from serve_app.redis.keyspace import suspect_key


class Quarantine:
    """A lock over all ingresses, `{ns}:suspect`. Its lease expires if its holder dies."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self._redis = redis
        self._key = suspect_key(namespace)

    @asynccontextmanager
    async def alone(self, within_s: float) -> AsyncIterator[bool]:
        """Wait for the turn and hold it while the block runs; yields False if the turn has not come
        in time.

        Raises:
            RedisUnavailable: Redis cannot be reached.
        """
        lock = self._redis.lock(
            self._key,
            timeout=timings.QUARANTINE_LEASE_S,
            sleep=timings.QUARANTINE_POLL_S,
            thread_local=False,
        )
        if not await redis_call(lambda: lock.acquire(blocking_timeout=within_s)):
            yield False
            return

        async def renew() -> None:
            while True:
                await asyncio.sleep(timings.QUARANTINE_LEASE_S / 3)
                with suppress(RedisUnavailable):
                    # The lease may end: then two such requests run at a time, no more.
                    await redis_call(lock.reacquire)

        renewing = asyncio.create_task(renew())
        try:
            yield True
        finally:
            renewing.cancel()
            with suppress(RedisUnavailable):
                await redis_call(lock.release)
