"""The way to Redis as a process of its own, so that a connection can be cut without a FIN.

It passes bytes on in both directions. At SIGUSR1 it goes on holding every connection that has subscribed to something,
and passes nothing more on it: what a switch or a firewall does that forgets a connection.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal

_CHUNK_BYTES = 1 << 16


class Connection:
    """One client's connection and its own to Redis."""

    def __init__(self) -> None:
        self.subscribed = False
        self.dead = False

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up: bool) -> None:
        """One direction, until its end."""
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
        """From now on they are half open."""
        for connection in self._connections:
            connection.dead = connection.dead or connection.subscribed

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until both directions have ended."""
        connection = Connection()
        self._connections.add(connection)
        try:
            with contextlib.suppress(OSError):  # either side may end it at any time
                redis_reader, redis_writer = await asyncio.open_connection("127.0.0.1", self._redis_port)
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
