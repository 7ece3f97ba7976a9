"""Whether Redis takes values as large as requests may be.

Redis closes the connection of whoever sends more than its `proto-max-bulk-len` or
`client-query-buffer-limit`, and a proxy before it may have a bound of its own. The service's user
may not read the configuration, and only some of them say why; so a value of that size is sent, and
asked back, on a connection of its own. Nothing is stored.
"""

from __future__ import annotations

import asyncio
import math

from serve_app import timings
from serve_app.clock import SYSTEM
from serve_app.errors import AnswerLost, RedisUnavailable
from serve_app.redis.connection import connect
from serve_app.redis.replies import check_passes
from serve_app.settings import RedisSettings


class ValueSizes:
    """What is known of one Redis.

    Args:
        largest_bytes: of all values that the service may write.
    """

    def __init__(self, settings: RedisSettings, largest_bytes: int) -> None:
        self._settings = settings
        self._largest_bytes = largest_bytes
        self._one = asyncio.Lock()
        self._due = True
        self._looked_s = -math.inf
        self._said = ""
        self.refused_bytes = math.inf
        """The smallest size that was refused."""

    async def warnings(self, anew: bool) -> list[str]:
        """Try the largest size if it may have changed what Redis takes, and not too often.

        Args:
            anew: whether Redis was connected to again, and may be another one.
        """
        now_s = SYSTEM.monotonic_s()
        self._due |= anew or self.refused_bytes < math.inf
        if self._due and now_s - self._looked_s >= timings.REDIS_SIZES_AGAIN_S:
            self._looked_s = now_s
            try:
                async with self._one:
                    self._said = await self._tried(self._largest_bytes)
            except RedisUnavailable:
                pass  # it is too slow, or has gone: then the next try is soon enough
            else:
                self._due = False
                self.refused_bytes = self._largest_bytes if self._said else math.inf
        if not self._said:
            return []
        return [
            f"it does not take and give values of {self._largest_bytes:,} bytes, which requests "
            f"may have ({self._said}): raise its proto-max-bulk-len, client-query-buffer-limit and "
            "client-output-buffer-limit, and what a proxy before it lets pass, or lower "
            "ingress.max_body_bytes"
        ]

    async def refuses(self, size_bytes: int) -> bool:
        """Whether Redis refuses a value of this size; tries it.

        Raises:
            RedisUnavailable: it cannot be told now.
        """
        async with self._one:  # a crowd of refused clients must not send everything twice at once
            if size_bytes < self.refused_bytes and (said := await self._tried(size_bytes)):
                self._said, self.refused_bytes, self._due = said, size_bytes, True
        return size_bytes >= self.refused_bytes

    async def _tried(self, size_bytes: int) -> str:
        """What Redis says against a value; empty if it takes it, and gives it back."""
        said = ""
        for size in (size_bytes, size_bytes, 1):  # one connection may end for another reason
            connection = await connect(self._settings)
            try:
                async with asyncio.timeout(timings.REDIS_SIZE_ANSWER_S):
                    (reply,) = await connection.call([("EVAL", "return ARGV[1]", 0, bytes(size))])
            except TimeoutError:
                raise RedisUnavailable("no answer in time") from None
            except AnswerLost:
                if size == 1:
                    raise
                said = "it closes the connection"
            else:
                if not isinstance(reply, Exception):
                    return said if size == 1 else ""
                check_passes("EVAL", str(reply))
                said = str(reply)
            finally:
                connection.abort()
        return said
