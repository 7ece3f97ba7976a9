"""A connection to Redis that can go silent without closing, as behind a firewall that has forgotten
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit, urlunsplit


class Proxy:
    """Forwards to Redis, unless it is `dead`: then it accepts and reads, but answers nothing."""

    def __init__(self, url: str) -> None:
        self._to = urlsplit(url)
        self._clients: list[asyncio.StreamWriter] = []
        self.dead = False
        self.accepted = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        self.accepted += 1
        self._clients.append(writer)
        redis_reader, redis_writer = await asyncio.open_connection(self._to.hostname, self._to.port)
        try:
            await asyncio.gather(self._pump(reader, redis_writer), self._pump(redis_reader, writer))
        except asyncio.CancelledError:
            pass  # the test is over
        finally:
            redis_writer.close()
            writer.close()

    def revive(self) -> None:
        """Answer again; what was sent meanwhile is lost, and so are its connections."""
        self.dead = False
        for writer in self._clients:
            writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                if not self.dead:
                    writer.write(data)
        except OSError:
            pass  # the other end has gone
        finally:
            writer.close()


@asynccontextmanager
async def proxy(url: str) -> AsyncIterator[Proxy]:
    """A proxy in front of a Redis; its `url` has that Redis's login."""
    made = Proxy(url)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    parts = urlsplit(url)
    login = parts.netloc.rpartition("@")[0]
    made.url = urlunsplit(
        parts._replace(netloc=f"{login}@127.0.0.1:{port}" if login else f"127.0.0.1:{port}")
    )
    try:
        yield made
    finally:
        server.close()
