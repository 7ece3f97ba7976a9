"""The page of metrics for everybody who asks: put together once a second at most, however many ask."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable

_MADE_AGAIN_S = 1.0


class MetricsPage:
    """One page, and one maker of it at a time."""

    def __init__(self, make: Callable[[], Awaitable[bytes]]) -> None:
        self._make = make
        self._page = b""
        self._made_s = -math.inf
        self._making = asyncio.Lock()

    async def read(self) -> bytes:
        """The page, a second old at most where it was quickly made."""
        async with self._making:
            if time.monotonic() - self._made_s >= _MADE_AGAIN_S:
                self._page = await self._make()
                self._made_s = time.monotonic()
            return self._page
