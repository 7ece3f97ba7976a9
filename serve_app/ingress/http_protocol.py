"""The server's side of a client's connection: uvicorn's, with as few writes as possible. Each costs
a system call here and wakes whoever reads, HAProxy for one, which then reads and writes again.

What is written to a connection in one turn of the event loop leaves in one write, so the head of an
answer leaves with its first bytes, and the last bytes with what ends the answer. Who sends the
events of a stream can also hand them to the connection itself (`Push`): they leave at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve_app import timings

Push = Callable[[bytes], bool]
"""Sends bytes of an answer whose head was sent with `transfer-encoding: chunked`; for whoever may
call its `send` now. False: send them with that, because there are none, or the client has not taken
all that was sent before, or has left."""
PUSH = "hermes.push"
"""In `scope["extensions"]` of every request but a HEAD, whose answer has no bytes."""


class _Gathered:
    """A transport that gathers what is written in a turn of the event loop. It keeps nothing back
    while the socket does not take everything, nor more than a piece of an answer, so the flow
    control remains that of the transport behind it.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._call_soon = loop.call_soon
        self._parts: list[bytes] = []
        self._size = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._call_soon(self._flush)
        self._parts.append(data)
        self._size += len(data)
        if self._size >= timings.SEND_BYTES or self._transport.get_write_buffer_size():
            self._flush()

    def push(self, body: bytes) -> bool:  # see `Push`
        if asyncio.get_running_loop() is not self._loop:  # Serve may run the application in another
            return False
        transport = self._transport
        if not body or transport.is_closing() or transport.get_write_buffer_size():
            return False
        write = self.write if self._parts else transport.write
        write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def _flush(self) -> None:
        data = b"".join(self._parts)
        self._parts, self._size = [], 0
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def get_write_buffer_size(self) -> int:
        return self._size + self._transport.get_write_buffer_size()

    def close(self) -> None:
        self._flush()
        self._transport.close()


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._gathered = _Gathered(transport, self.loop)
        super().connection_made(cast(asyncio.Transport, self._gathered))

    def on_headers_complete(self) -> None:
        super().on_headers_complete()  # starts the application's task, which runs later
        if self.scope["method"] != "HEAD":
            self.scope["extensions"] = {PUSH: self._gathered.push}  # type: ignore[dict-item]
