"""The connections that all callers of a process share. Each is opened when it is needed, and again
after it was lost. Who needs it meanwhile waits for that attempt and shares its failure, and for a
moment nobody tries: else the last of a hundred callers would wait for a hundred timeouts.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence

from serve_app import timings
from serve_app.clock import SYSTEM
from serve_app.errors import RedisUnavailable
from serve_app.loops import jittered, retrieved
from serve_app.redis.connection import Command, RespConnection, connect
from serve_app.redis.replies import Reply, is_demoted
from serve_app.settings import RedisSettings


class SharedConnection:
    """Opened by `opened`, which raises `RedisUnavailable`. For `quiet_s` after a failure, callers
    get the same failure at once.
    """

    def __init__(
        self,
        opened: Callable[[], Awaitable[RespConnection]],
        quiet_s: float = timings.REDIS_QUIET_S,
    ) -> None:
        self._opened = opened
        self._quiet_s = quiet_s
        self._opening: asyncio.Task[RespConnection] | None = None
        self._current: RespConnection | None = None
        self._quiet_until_s = -math.inf
        self._problem = ""

    @property
    def current(self) -> RespConnection | None:
        return self._current if self._current is not None and self._current.usable else None

    async def get(self) -> RespConnection:
        """The connection; opens it if necessary. Raises `RedisUnavailable`."""
        if (connection := self.current) is not None:
            return connection
        if self._opening is None:
            if SYSTEM.monotonic_s() < self._quiet_until_s:
                raise RedisUnavailable(self._problem)
            self._opening = asyncio.create_task(self._open(), name="redis-connection")
            self._opening.add_done_callback(retrieved)
        try:
            return await asyncio.shield(self._opening)
        except RedisUnavailable as error:
            # a new exception for each caller, because exceptions carry tracebacks
            raise RedisUnavailable(str(error)) from None

    def try_again(self) -> None:
        """Redis can be reached: the next caller may open the connection, whenever it failed."""
        self._quiet_until_s = -math.inf

    async def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        if self._current is not None:
            self._current.abort()

    async def _open(self) -> RespConnection:
        try:
            self._current = await self._opened()
            return self._current
        except RedisUnavailable as error:
            self._problem = str(error)
            self._quiet_until_s = SYSTEM.monotonic_s() + jittered(self._quiet_s)
            raise RedisUnavailable(self._problem) from None
        finally:
            self._opening = None


class RedisLink:
    """One pipelined connection for what is small, one for what waits in Redis, and a few for what
    is large, each of which serves one caller at a time: a large question or answer delays no small
    one, and one that takes too long ends for its caller alone.

    Args:
        within_s: a time limit for every answer, if it is lower than the one in the settings.
    """

    def __init__(
        self, settings: RedisSettings, large_at_once: int = 4, within_s: float = math.inf
    ) -> None:
        self._within_s = min(within_s, settings.response_timeout_s)
        self._shared = SharedConnection(lambda: connect(settings))
        self._waiting = SharedConnection(lambda: connect(settings))
        self._large = [SharedConnection(lambda: connect(settings)) for _ in range(large_at_once)]
        self._idle: asyncio.LifoQueue[SharedConnection] = asyncio.LifoQueue()
        for connection in self._large:
            self._idle.put_nowait(connection)

    async def call(self, commands: Sequence[Command], large: bool = False) -> list[Reply]:
        """`RespConnection.ask` on a shared connection, and with its time limit. Say if the replies
        may be `large`; large commands are recognised.
        """
        if not large and not any(map(_is_large, commands)):
            return await self._ask(self._shared, commands)
        try:
            async with asyncio.timeout(self._within_s):
                connection = await self._idle.get()
        except TimeoutError:
            raise RedisUnavailable("too many large questions to Redis at a time") from None
        try:
            return await self._ask(connection, commands)
        finally:
            self._idle.put_nowait(connection)

    async def wait(self, command: Command) -> Reply:
        """Send a command that may wait for something in Redis, as `call` does. Once a caller is
        cancelled, Redis executes its command no more.
        """
        try:
            return (await self._ask(self._waiting, [command]))[0]
        except asyncio.CancelledError:
            await self._waiting.close()
            raise

    async def _ask(self, shared: SharedConnection, commands: Sequence[Command]) -> list[Reply]:
        connection = await shared.get()
        replies = await connection.ask(commands, self._within_s)
        if any(map(is_demoted, replies)):
            connection.abort()  # the name may lead to the new primary by now
        return replies

    def try_again(self) -> None:
        """See `SharedConnection.try_again`."""
        for connection in (self._shared, self._waiting, *self._large):
            connection.try_again()

    async def close(self) -> None:
        for connection in (self._shared, self._waiting, *self._large):
            await connection.close()


def _is_large(command: Command) -> bool:
    return any(type(word) is bytes and len(word) > timings.LARGE_BYTES for word in command)
