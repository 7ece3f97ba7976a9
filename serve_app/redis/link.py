"""The connections that all callers of a process share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from serve_app import timings
from serve_app.errors import RedisUnavailable
from serve_app.redis.connection import Command, RespConnection, connect
from serve_app.redis.replies import Reply, is_demoted
from serve_app.redis.shared import SharedConnection
from serve_app.settings import RedisSettings


class RedisLink:
    """One pipelined connection for what is small, one for what waits in Redis, and a few for what
    is large, each of which serves one caller at a time: a large question or answer delays no small
    one, and one that takes too long ends for its caller alone. They are opened when they are
    needed, and again after they were lost.

    Args:
        large_at_once: how many of those few.
    """

    def __init__(self, settings: RedisSettings, large_at_once: int = 4) -> None:
        self._settings = settings
        self._shared = SharedConnection(lambda: connect(settings))
        self._waiting = SharedConnection(lambda: connect(settings))
        self._large = [SharedConnection(lambda: connect(settings)) for _ in range(large_at_once)]
        self._idle: asyncio.LifoQueue[SharedConnection[RespConnection]] = asyncio.LifoQueue()
        for connection in self._large:
            self._idle.put_nowait(connection)

    async def call(self, commands: Sequence[Command], large: bool = False) -> list[Reply]:
        """Send commands in one write and wait for their replies; errors are exception objects among
        them.

        Args:
            large: whether the replies may be large. Large commands are recognised.

        Raises:
            RedisUnavailable: Redis cannot be reached, or did not answer in time; if it is
                `AnswerLost`, it is unknown whether it executed the commands.
        """
        if not large and not any(map(_is_large, commands)):
            return await self._ask(self._shared, commands)
        try:
            async with asyncio.timeout(self._settings.response_timeout_s):
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

    async def _ask(
        self, shared: SharedConnection[RespConnection], commands: Sequence[Command]
    ) -> list[Reply]:
        connection = await shared.get()
        replies = await connection.ask(commands, self._settings.response_timeout_s)
        if any(map(is_demoted, replies)):
            connection.abort()  # the name may lead to the new primary by now
        return replies

    async def close(self) -> None:
        for connection in (self._shared, self._waiting, *self._large):
            await connection.close()


def _is_large(command: Command) -> bool:
    return any(type(word) is bytes and len(word) > timings.LARGE_BYTES for word in command)
