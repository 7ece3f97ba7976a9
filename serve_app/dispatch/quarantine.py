"""Requests that have killed engines run one at a time, so that an innocent request is not blamed
for another one's crash.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from serve_app import timings
from serve_app.errors import RedisUnavailable
from serve_app.redis.connection import Script
from serve_app.redis.keyspace import suspect_key
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import answered

_KEEP = Script(
    "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end"
)
"""For so many milliseconds, if the lock is still this holder's; 0 deletes it."""


class Quarantine:
    """A lock over all ingresses, `{ns}:suspect`. Its lease expires if its holder dies."""

    def __init__(self, link: RedisLink, namespace: str) -> None:
        self._link = link
        self._key = suspect_key(namespace)

    @asynccontextmanager
    async def alone(self, within_s: float) -> AsyncIterator[bool]:
        """Wait for the turn and hold it while the block runs; yields False if the turn has not come
        in time.

        Raises:
            RedisUnavailable: Redis cannot be reached.
        """
        holder = secrets.token_hex(16)
        try:
            async with asyncio.timeout(within_s):
                while not await self._taken(holder):
                    await asyncio.sleep(timings.QUARANTINE_POLL_S)
        except TimeoutError:
            await self._keep(holder, 0)
            yield False
            return

        async def renew() -> None:
            while True:  # if the lease ends, two such requests run at a time, and no more
                await asyncio.sleep(timings.QUARANTINE_LEASE_S / 3)
                await self._keep(holder, int(timings.QUARANTINE_LEASE_S * 1000))

        renewing = asyncio.create_task(renew())
        try:
            yield True
        finally:
            renewing.cancel()
            await self._keep(holder, 0)

    async def _taken(self, holder: str) -> bool:
        lease_ms = int(timings.QUARANTINE_LEASE_S * 1000)
        (reply,) = await self._link.call([("SET", self._key, holder, "NX", "PX", lease_ms)])
        return answered(reply) is not None

    async def _keep(self, holder: str, for_ms: int) -> None:
        with suppress(RedisUnavailable):
            await self._link.call([("EVAL", _KEEP, 1, self._key, holder, for_ms)])
