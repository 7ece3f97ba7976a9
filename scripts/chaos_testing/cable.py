"""A TCP proxy to Redis as a separate process, which can break connections without a FIN.

It forwards bytes in both directions. On SIGUSR1 it keeps every connection that has subscribed to
something open, but forwards nothing more on it, like a switch or a firewall that forgets a
connection.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal

_CHUNK_BYTES = 1 << 16


class Connection:
    """One client's connection, and the corresponding one to Redis."""

    def __init__(self) -> None:
        self.subscribed = False
        self.dead = False

    async def carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up: bool
    ) -> None:
        """Forward one direction until its end."""
        while data := await reader.read(_CHUNK_BYTES):
            self.subscribed = self.subscribed or (up and b"SUBSCRIBE" in data)
            if not self.dead:
                writer.write(data)
                await writer.drain()
        if not self.dead:
            writer.close()


class Cable:
    """Listens, and connects each client to Redis."""

    def __init__(self, redis_port: int) -> None:
        self._redis_port = redis_port
        self._connections: set[Connection] = set()

    def cut_subscriptions(self) -> None:
        """Make all subscribed connections half open from now on."""
        for connection in self._connections:
            connection.dead = connection.dead or connection.subscribed

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection until both directions have ended."""
        connection = Connection()
        self._connections.add(connection)
        try:
            with contextlib.suppress(OSError):  # either side may end it at any time
                redis_reader, redis_writer = await asyncio.open_connection(
                    "127.0.0.1", self._redis_port
                )
                await asyncio.gather(
                    connection.carry(reader, redis_writer, up=True),
                    connection.carry(redis_reader, writer, up=False),
                )
        finally:
            self._connections.discard(connection)
            writer.transport.abort()


async def main() -> None:
    """Listen until this process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int, help="to listen on, on the loopback")
    parser.add_argument("redis_port", type=int, help="of Redis, on the loopback")
    options = parser.parse_args()
    cable = Cable(options.redis_port)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, cable.cut_subscriptions)
    server = await asyncio.start_server(cable.accept, "127.0.0.1", options.port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
