"""Sends answers no faster than their clients take them.

uvicorn's `send` waits before it writes, until the socket's buffer has room, and returns right after
that. So one large message would be in the buffer as a whole, for as long as a client that does not
read likes, while nothing here waits any longer. In pieces (`timings.SEND_BYTES`), with an empty
message behind the last, what such a client keeps there is bounded.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

from starlette.types import Message, Send

from serve_app import timings
from serve_app.clock import SYSTEM


def pieces(body: bytes) -> Iterator[bytes]:
    """The parts in which a large body is sent."""
    for start in range(0, len(body), timings.SEND_BYTES):
        yield body[start : start + timings.SEND_BYTES]


class Paced:
    """The `send` of one answer, in whose task it is made. It returns from the last message of a
    large answer only when the client has taken nearly all of it.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._task = asyncio.current_task()
        self.sending_since_s = math.inf
        """Since when the client has taken nothing, in monotonic seconds; infinite while nothing is
        sent.
        """
        self.was_cut = False

    def cut(self) -> None:
        """The client no longer reads: cancel the answer."""
        if self._task is not None and not self.was_cut:
            self.was_cut = True
            self._task.cancel()

    async def __call__(self, message: Message) -> None:
        body = message.get("body", b"")
        if len(body) <= timings.SEND_BYTES:
            await self._take(message)
            return
        for piece in pieces(body):
            await self._take({**message, "body": piece, "more_body": True})
            await asyncio.sleep(0)  # a quick client takes all of it without a pause for others
        await self._take({**message, "body": b""})

    async def _take(self, message: Message) -> None:
        self.sending_since_s = SYSTEM.monotonic_s()
        await self._send(message)
        self.sending_since_s = math.inf
