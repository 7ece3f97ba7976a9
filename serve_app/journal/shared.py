"""One connection, shared by all who ask for it: opened when it is needed, and again after it was lost.

Who asks while it is being opened waits for that one attempt, and shares its failure: a Redis that accepts and does not
answer would else cost the last of a hundred callers a hundred time limits. After a failure, for a moment, nobody tries.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from serve_app.errors import JournalUnavailable
from serve_app.loops import jittered

QUIET_S = 0.2


class Connection(Protocol):
    """What is shared."""

    @property
    def usable(self) -> bool:
        """Whether commands can be sent."""

    def abort(self) -> None:
        """Drop it at once."""


C = TypeVar("C", bound=Connection)


class SharedConnection(Generic[C]):
    """Of one process.

    Args:
        opened: makes it; raises `JournalUnavailable` or `TimeoutError`.
        quiet_s: after a failure, who asks within so long is told of it at once.
    """

    def __init__(self, opened: Callable[[], Awaitable[C]], quiet_s: float = QUIET_S) -> None:
        self._opened = opened
        self._quiet_s = quiet_s
        self._opening: asyncio.Task[C] | None = None
        self._current: C | None = None
        self._quiet_until_s = -math.inf
        self._problem = ""

    @property
    def current(self) -> C | None:
        """The connection, where there is one that can be used."""
        return self._current if self._current is not None and self._current.usable else None

    async def get(self) -> C:
        """The connection, opened where it is not.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        if (connection := self.current) is not None:
            return connection
        if self._opening is None:
            if time.monotonic() < self._quiet_until_s:
                raise JournalUnavailable(self._problem)
            self._opening = asyncio.create_task(self._open(), name="redis-connection")
            self._opening.add_done_callback(_retrieved)
        try:
            return await asyncio.shield(self._opening)
        except JournalUnavailable as error:
            raise JournalUnavailable(str(error)) from None  # each its own: they carry tracebacks

    async def close(self) -> None:
        """Let go of it."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        if self._current is not None:
            self._current.abort()

    async def _open(self) -> C:
        try:
            self._current = await self._opened()
            return self._current
        except (JournalUnavailable, TimeoutError) as error:
            self._problem = str(error) or "no answer from Redis"
            self._quiet_until_s = time.monotonic() + jittered(self._quiet_s)
            raise JournalUnavailable(self._problem) from None
        finally:
            self._opening = None


def _retrieved(opening: asyncio.Task[C]) -> None:
    """All who waited may have gone."""
    if not opening.cancelled():
        opening.exception()
