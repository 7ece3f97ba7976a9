"""The page of metrics for everybody who asks: put together once in a while, however many ask."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable


class MetricsPage:
    """One page, and one maker of it at a time.

    Args:
        period_s: seconds for which a page is good.
    """

    def __init__(self, make: Callable[[], Awaitable[bytes]], period_s: float) -> None:
        self._make = make
        self._period_s = period_s
        self._page = b""
        self._made_s = -math.inf
        self._making = asyncio.Lock()

    async def read(self) -> bytes:
        """The page, a period old at most where it was quickly made."""
        async with self._making:
            if time.monotonic() - self._made_s >= self._period_s:
                self._page = await self._make()
                self._made_s = time.monotonic()
            return self._page
