"""What cannot be sent is its sender's problem alone: the replies of all others stay theirs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serve_app.journal.connection import RespConnection, connect
from serve_app.settings import RedisSettings

UNSENDABLE = {
    "4,301 digits": 10**4_300, "65 bits": 2**64, "below": -(2**63) - 1, "None": None, "True": True, "list": [1],
    "surrogate": "\ud800",
}  # fmt: skip


@pytest.mark.parametrize("unsendable", UNSENDABLE.values(), ids=UNSENDABLE)
def test_what_cannot_be_packed_leaves_the_connection_usable(redis_url: str, unsendable: Any) -> None:
    async def main() -> None:
        connection: RespConnection = await connect(RedisSettings(url=redis_url))
        try:
            before = connection.call([("ECHO", "before")])
            with pytest.raises(ValueError):
                connection.call([("ECHO", "good"), ("ECHO", unsendable)])
            after = connection.call([("ECHO", "after"), ("ECHO", 2**64 - 1), ("ECHO", 1.5)])
            async with asyncio.timeout(10):
                assert await before == [b"before"]
                assert await after == [b"after", b"18446744073709551615", b"1.5"]
        finally:
            connection.abort()

    asyncio.run(main())
