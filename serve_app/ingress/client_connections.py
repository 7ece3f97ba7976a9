"""The server's side of a client's connection: answers leave with few writes, and no faster than the
client takes them.

The protocol is uvicorn's (`HttpProtocol`), but what is written in one turn of the event loop leaves
in one write: each costs a system call here and wakes whoever reads, HAProxy for one, which then
reads and writes again. So the head of an answer leaves with its first bytes, and the last bytes
with what ends the answer. Who sends the events of a stream can also hand them to the connection
itself (`Push`): they leave at once.

uvicorn's `send` waits before it writes, until the socket's buffer has room, and returns right after
that. So one large message would be in the buffer as a whole, for as long as a client that does not
read likes, while nothing here waits any longer. In pieces (`timings.SEND_BYTES`), with an empty
message behind the last, what such a client keeps there is bounded.

But it occupies a connection, and a reader's place. After `ingress.stalled_client_timeout_s` in
which it has taken nothing it is disconnected and counts as a client that has left. One that takes a
little all the time may take as long as it likes.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Any, cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve_app import timings
from serve_app.clock import SYSTEM
from serve_app.loops import Loops
from serve_app.observability.logs import about

log = logging.getLogger("hermes.ingress")

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
        self.begun = False
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
        for start in range(0, len(body), timings.SEND_BYTES):
            piece = body[start : start + timings.SEND_BYTES]
            await self._take({**message, "body": piece, "more_body": True})
            await asyncio.sleep(0)  # a quick client takes all of it without a pause for others
        if not message.get("more_body", False):
            await self._take({**message, "body": b""})

    async def _take(self, message: Message) -> None:
        self.sending_since_s, self.begun = SYSTEM.monotonic_s(), True
        await self._send(message)
        self.sending_since_s = math.inf


class SlowReaders:
    """Watches all answers of one ingress. `stalled_s`: seconds without a byte after which a client
    is disconnected.
    """

    def __init__(self, stalled_s: float, loops: Loops) -> None:
        self._stalled_s = stalled_s
        self._sending: set[Paced] = set()
        self._loops = loops

    async def start(self) -> None:
        self._loops.keep("stalled-readers", self._watch)

    async def paced(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Run an application, which may send messages of any size, to its end, or until its client
        is disconnected. Says in the state of the request whether its answer has begun.
        """
        task, paced = asyncio.current_task(), Paced(send)
        self._sending.add(paced)
        try:
            await app(scope, receive, paced)
        except asyncio.CancelledError:
            if not paced.was_cut or task is None:
                raise
            task.uncancel()
            extra = about(tenant=scope.get("state", {}).get("tenant", ""))
            log.info("%s: the client does not read and is disconnected", scope["path"], extra=extra)
        finally:
            self._sending.discard(paced)
            scope["state"]["begun"] = paced.begun

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(timings.STALLED_LOOK_AT_MOST_S, self._stalled_s / 4))
            self._cut_stalled()

    def _cut_stalled(self) -> None:
        since_s = SYSTEM.monotonic_s() - self._stalled_s
        for one in [one for one in self._sending if one.sending_since_s < since_s]:
            one.cut()
