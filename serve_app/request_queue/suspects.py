"""Requests that have taken engines down run one at a time, so that who is innocent is not blamed with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from redis.asyncio import Redis
from redis.exceptions import RedisError

from serve_app.journal.client import reaching

_LEASE_S = 10.0
_POLL_S = 0.2


class Suspects:
    """A lock over all ingresses: `{ns}:suspect`. Its lease ends by itself where its holder dies."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self._redis = redis
        self._key = f"{namespace}:suspect"

    @asynccontextmanager
    async def alone(self, within_s: float) -> AsyncIterator[bool]:
        """Wait for one's turn, and hold it; false where it has not come in time.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        lock = self._redis.lock(self._key, timeout=_LEASE_S, sleep=_POLL_S, thread_local=False)
        if not await reaching(lambda: lock.acquire(blocking_timeout=within_s)):
            yield False
            return

        async def renew() -> None:
            while True:
                await asyncio.sleep(_LEASE_S / 3)
                with suppress(RedisError, OSError):  # the lease may end: then two suspects run at a time, no more
                    await lock.reacquire()

        renewing = asyncio.create_task(renew())
        try:
            yield True
        finally:
            renewing.cancel()
            with suppress(RedisError, OSError):
                await lock.release()
