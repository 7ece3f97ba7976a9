"""A command that cannot be sent fails for its sender alone; all others get their own replies."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from serve_app.redis.connection import RespConnection, connect
from serve_app.settings import RedisSettings
from tests.journal.journal_helpers import redis_settings

UNSENDABLE = {
    "4,301 digits": 10**4_300,
    "65 bits": 2**64,
    "below": -(2**63) - 1,
    "None": None,
    "True": True,
    "list": [1],
    "surrogate": "\ud800",
}


@pytest.mark.parametrize("unsendable", UNSENDABLE.values(), ids=UNSENDABLE)
async def test_what_cannot_be_packed_leaves_the_connection_usable(
    redis_url: str, unsendable: Any
) -> None:
    connection: RespConnection = await connect(RedisSettings(**redis_settings(redis_url)))
    try:
        before = connection.call([("ECHO", "before")])
        with pytest.raises(ValueError):
            connection.call([("ECHO", "good"), ("ECHO", unsendable)])
        after = connection.call([("ECHO", "after"), ("ECHO", 2**64 - 1), ("ECHO", 1.5)])
        async with asyncio.timeout(60):
            assert await before == [b"before"]
            assert await after == [b"after", b"18446744073709551615", b"1.5"]
    finally:
        connection.abort()


async def test_a_caller_that_gives_up_while_redis_greets_leaves_no_connection_behind() -> None:
    greeted, closed = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        greeted.set()
        with suppress(ConnectionError):
            await reader.read()
        closed.set()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    settings = RedisSettings(url=f"redis://127.0.0.1:{port}/0", connect_timeout_s=60)
    connecting = asyncio.create_task(connect(settings))
    await greeted.wait()
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    async with asyncio.timeout(60):
        await closed.wait()
    server.close()
