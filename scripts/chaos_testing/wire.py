"""TCP proxies to several Redis as a separate process, which deliver to replicas late.

Each forwards bytes in both directions. What a primary sends to a replica arrives after a delay, and
is lost if the primary dies meanwhile, as it would be on a slow or long way between two nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from functools import partial

_CHUNK_BYTES = 1 << 16


class Connection:
    """One client's connection, and the corresponding one to Redis."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._of_replica = False
        self._due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward to Redis."""
        while data := await reader.read(_CHUNK_BYTES):
            self._of_replica = self._of_replica or b"PSYNC" in data
            writer.write(data)
            await writer.drain()

    async def down(self, reader: asyncio.StreamReader) -> None:
        """Take what Redis sends."""
        while data := await reader.read(_CHUNK_BYTES):
            late_s = self._delay_s if self._of_replica else 0.0
            self._due.put_nowait((asyncio.get_running_loop().time() + late_s, data))

    async def deliver(self, writer: asyncio.StreamWriter) -> None:
        """Forward it in time."""
        while True:
            due_s, data = await self._due.get()
            await asyncio.sleep(max(0.0, due_s - asyncio.get_running_loop().time()))
            writer.write(data)
            await writer.drain()


async def accept(
    port: int, delay_s: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Serve a connection until one side ends it."""
    with contextlib.suppress(OSError):
        redis_reader, redis_writer = await asyncio.open_connection("127.0.0.1", port)
        connection = Connection(delay_s)
        parts = [
            asyncio.create_task(connection.up(reader, redis_writer)),
            asyncio.create_task(connection.down(redis_reader)),
            asyncio.create_task(connection.deliver(writer)),
        ]
        await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)
        redis_writer.transport.abort()
    writer.transport.abort()


async def main() -> None:
    """Run until it is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay-s", type=float, required=True)
    parser.add_argument("pairs", nargs="+", help="listen:redis, two ports")
    options = parser.parse_args()
    for pair in options.pairs:
        listen, port = map(int, pair.split(":"))
        await asyncio.start_server(partial(accept, port, options.delay_s), "127.0.0.1", listen)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
