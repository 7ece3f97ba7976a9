"""Connections to one server that are used again and again."""

import asyncio
import time

from .connection import Exchange, HttpConnection
from .prompts import RequestMaker

# Servers close idle connections (uvicorn after 5 s); one that is older is not worth the race.
_REUSE_WITHIN_S = 2.0
_PAUSE_S = 0.2


class ConnectionPool:
    """As many connections as there are requests under way; each request gets one to itself."""

    def __init__(self, maker: RequestMaker, timeout_s: float) -> None:
        self._maker = maker
        self._timeout_s = timeout_s
        self._idle: list[HttpConnection] = []

    async def perform(self, request: bytes, exchange: Exchange) -> None:
        """Send ``request`` and fill ``exchange`` in; what went wrong is in ``exchange.error``."""
        connection: HttpConnection | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._connection()
                await connection.perform(request, exchange)
        except asyncio.CancelledError:
            if connection is not None:
                connection.close()
            raise
        except TimeoutError:
            exchange.error = f"no end within {self._timeout_s:g} s"
        except OSError as refused:
            exchange.error = f"cannot connect: {refused}"
            # A refusal comes at once: without a pause a closed loop would turn into a busy loop.
            await asyncio.sleep(_PAUSE_S)
        exchange.finished_s = exchange.finished_s or time.perf_counter()
        if connection is not None:
            self._give_back(connection, exchange)

    def close(self) -> None:
        """Close what is idle."""
        for connection in self._idle:
            connection.close()

    async def _connection(self) -> HttpConnection:
        while self._idle:
            connection = self._idle.pop()
            if (
                connection.reusable
                and time.perf_counter() - connection.idle_since_s < _REUSE_WITHIN_S
            ):
                return connection
            connection.close()
        maker = self._maker
        return await HttpConnection.open(
            maker.host, maker.port, maker.shape.endpoint, maker.shape.stream
        )

    def _give_back(self, connection: HttpConnection, exchange: Exchange) -> None:
        if exchange.error is None and connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
