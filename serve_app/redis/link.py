"""One pipelined connection that all callers of a process share."""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.redis.connection import Command, connect
from serve_app.redis.replies import Reply, is_demoted
from serve_app.redis.shared import SharedConnection
from serve_app.settings import RedisSettings


class RedisLink:
    """One connection that all callers share. It is opened when it is needed, and again after it was
    lost.
    """

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        self._shared = SharedConnection(lambda: connect(settings))

    async def call(self, commands: Sequence[Command]) -> list[Reply]:
        """Send commands in one write and wait for their replies; errors are exception objects among
        them.

        Raises:
            RedisUnavailable: Redis cannot be reached, or did not answer in time; it is then unknown
                whether it executed the commands.
        """
        connection = await self._shared.get()
        replies = await connection.ask(commands, self._settings.response_timeout_s)
        if any(map(is_demoted, replies)):
            connection.abort()  # the name may lead to the new primary by now
        return replies

    async def close(self) -> None:
        """Close the connection."""
        await self._shared.close()
