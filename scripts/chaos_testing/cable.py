"""A TCP proxy to Redis as a separate process, which spoils connections as networks do.

It forwards bytes in both directions. On SIGUSR1 it keeps every connection that has subscribed to
something open, but forwards nothing more on it, like a switch or a firewall that forgets a
connection. With `--delay-s`, what a primary sends to a replica arrives late, and is lost if the
primary dies meanwhile, as it would be on a slow or long way between two nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal

_CHUNK_BYTES = 1 << 16


class Connection:
    """One client's connection, and the corresponding one to Redis."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._of_replica = False
        self._due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        self.subscribed = False
        self.dead = False

    async def up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward to Redis until the client's end."""
        while data := await reader.read(_CHUNK_BYTES):
            self.subscribed = self.subscribed or b"SUBSCRIBE" in data
            self._of_replica = self._of_replica or b"PSYNC" in data
            await self._send(writer, data)
        self._end(writer)

    async def down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward what Redis sends until its end; what is late then is lost."""
        delivering = asyncio.create_task(self._deliver(writer))
        try:
            while data := await reader.read(_CHUNK_BYTES):
                if self._of_replica and self._delay_s:
                    due_s = asyncio.get_running_loop().time() + self._delay_s
                    self._due.put_nowait((due_s, data))
                else:
                    await self._send(writer, data)
        finally:
            delivering.cancel()
        self._end(writer)

    async def _deliver(self, writer: asyncio.StreamWriter) -> None:
        """Forward what is late, in time."""
        while True:
            due_s, data = await self._due.get()
            await asyncio.sleep(max(0.0, due_s - asyncio.get_running_loop().time()))
            await self._send(writer, data)

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        if not self.dead:
            writer.write(data)
            await writer.drain()

    def _end(self, writer: asyncio.StreamWriter) -> None:
        if not self.dead:
            writer.close()


class Cable:
    """Listens, and connects each client to Redis."""

    def __init__(self, redis_port: int, delay_s: float) -> None:
        self._redis_port = redis_port
        self._delay_s = delay_s
        self._connections: set[Connection] = set()

    def cut_subscriptions(self) -> None:
        """Make all subscribed connections half open from now on."""
        for connection in self._connections:
            connection.dead = connection.dead or connection.subscribed

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection until both directions have ended."""
        connection = Connection(self._delay_s)
        self._connections.add(connection)
        try:
            with contextlib.suppress(OSError):  # either side may end it at any time
                redis_reader, redis_writer = await asyncio.open_connection(
                    "127.0.0.1", self._redis_port
                )
                await asyncio.gather(
                    connection.up(reader, redis_writer), connection.down(redis_reader, writer)
                )
        finally:
            self._connections.discard(connection)
            writer.transport.abort()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int, help="to listen on, on the loopback")
    parser.add_argument("redis_port", type=int, help="of Redis, on the loopback")
    parser.add_argument("--delay-s", type=float, default=0.0, help="of what replicas get (0)")
    options = parser.parse_args()
    cable = Cable(options.redis_port, options.delay_s)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, cable.cut_subscriptions)
    server = await asyncio.start_server(cable.accept, "127.0.0.1", options.port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
