"""One connection that all callers share. It is opened when it is needed, and again after it was
lost.

A caller that needs the connection while it is being opened waits for that attempt and shares its
failure. Otherwise, if Redis accepts connections but does not answer, the last of a hundred callers
would wait for a hundred timeouts. For a moment after a failure, nobody tries.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from serve_app import timings
from serve_app.clock import SYSTEM, Clock
from serve_app.errors import RedisUnavailable
from serve_app.loops import jittered


class Connection(Protocol):
    """What the shared object must offer."""

    @property
    def usable(self) -> bool:
        """Whether commands can be sent."""

    def abort(self) -> None:
        """Close it at once."""


C = TypeVar("C", bound=Connection)


class SharedConnection(Generic[C]):
    """The connection that one process shares.

    Args:
        opened: opens the connection; raises `RedisUnavailable`.
        quiet_s: for this long after a failure, callers get the same failure at once.
    """

    def __init__(
        self,
        opened: Callable[[], Awaitable[C]],
        quiet_s: float = timings.REDIS_QUIET_S,
        clock: Clock = SYSTEM,
    ) -> None:
        self._opened = opened
        self._clock = clock
        self._quiet_s = quiet_s
        self._opening: asyncio.Task[C] | None = None
        self._current: C | None = None
        self._quiet_until_s = -math.inf
        self._problem = ""

    @property
    def current(self) -> C | None:
        return self._current if self._current is not None and self._current.usable else None

    async def get(self) -> C:
        """The connection; opens it if necessary.

        Raises:
            RedisUnavailable: Redis cannot be reached.
        """
        if (connection := self.current) is not None:
            return connection
        if self._opening is None:
            if self._clock.monotonic_s() < self._quiet_until_s:
                raise RedisUnavailable(self._problem)
            self._opening = asyncio.create_task(self._open(), name="redis-connection")
            self._opening.add_done_callback(_retrieved)
        try:
            return await asyncio.shield(self._opening)
        except RedisUnavailable as error:
            # a new exception for each caller, because exceptions carry tracebacks
            raise RedisUnavailable(str(error)) from None

    async def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        if self._current is not None:
            self._current.abort()

    async def _open(self) -> C:
        try:
            self._current = await self._opened()
            return self._current
        except RedisUnavailable as error:
            self._problem = str(error)
            self._quiet_until_s = self._clock.monotonic_s() + jittered(self._quiet_s)
            raise RedisUnavailable(self._problem) from None
        finally:
            self._opening = None


def _retrieved(opening: asyncio.Task[C]) -> None:
    """Retrieve the exception, because all callers that waited may have gone."""
    if not opening.cancelled():
        opening.exception()
