"""A lean HTTP/1.1 client connection: one request at a time, timed, with no coroutine woken per
token.
"""

import asyncio
import json
import time
from array import array
from dataclasses import dataclass, field
from typing import Any, cast

import httptools

from .sse import Endpoint, EventCounter


@dataclass
class Exchange:
    """One request and what came of it. Times are ``time.perf_counter()`` seconds."""

    started_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    events: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    error: str | None = None
    body: bytearray | None = None
    """Set by whoever wants to keep the body of a stream; it is not kept otherwise."""

    def note_tokens(self, now_s: float, count: int) -> None:
        """``count`` token events came with one read of the socket, at ``now_s``."""
        if self.last_token_s is None:
            self.first_token_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_token_s)
        if count > 1:
            self.gaps_s.extend([0.0] * (count - 1))
        self.last_token_s = now_s
        self.events += count

    def note_usage(self, usage: dict[str, Any] | None) -> None:
        """Take the server's own count of tokens, under chat's or Responses' names."""
        if usage is None:
            self.tokens = self.events
            return
        self.tokens = usage.get("completion_tokens", usage.get("output_tokens", 0))
        self.prompt_tokens = usage.get("prompt_tokens", usage.get("input_tokens", 0))


class HttpConnection(asyncio.Protocol):
    """A keep-alive connection; ``perform`` sends one request and returns when its response has
    ended.
    """

    def __init__(self, endpoint: Endpoint, stream: bool) -> None:
        self.idle_since_s = 0.0
        self.reusable = True
        self._endpoint: Endpoint = endpoint
        self._stream = stream
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._ended: asyncio.Future[None] | None = None
        self._arrived = 0
        self._complete = False

    @classmethod
    async def open(cls, host: str, port: int, endpoint: Endpoint, stream: bool) -> "HttpConnection":
        """Connect; the event loop sets TCP_NODELAY."""
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_connection(lambda: cls(endpoint, stream), host, port)
        return protocol

    async def perform(self, request: bytes, exchange: Exchange) -> None:
        """Send ``request`` and fill ``exchange`` in; what went wrong is in ``exchange.error``."""
        assert self._transport is not None
        self._exchange = exchange
        self._events = EventCounter(self._endpoint)
        self._body = bytearray()
        self._parser: Any = httptools.HttpResponseParser(self)
        self._status = 0
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._ended

    def close(self) -> None:
        """Close at once; a request under way ends with an error."""
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's callback."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """asyncio's callback: everything of this read gets one and the same time."""
        now_s = time.perf_counter()
        if self._exchange is None:
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as broken:
            self._end(now_s, f"broken response: {broken.__context__ or broken}")
            self.close()
            return
        if self._arrived and self._exchange is not None:
            self._exchange.note_tokens(now_s, self._arrived)
            self._arrived = 0
        if self._complete:
            self._complete = False
            self._end(now_s, self._verdict())

    def on_headers_complete(self) -> None:
        """httptools' callback."""
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """httptools' callback, once per HTTP chunk."""
        if self._stream and self._status == 200:
            self._arrived += self._events.feed(body)
            if self._exchange is not None and self._exchange.body is not None:
                self._exchange.body += body
        else:
            self._body += body

    def on_message_complete(self) -> None:
        """httptools' callback; not called when the body stops short."""
        self._complete = True
        self.reusable = self.reusable and self._parser.should_keep_alive()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's callback."""
        self.reusable = False
        self._end(time.perf_counter(), "connection closed before the response ended")

    def _verdict(self) -> str | None:
        assert self._exchange is not None
        if self._status != 200:
            return f"HTTP {self._status}: {bytes(self._body[:160]).decode(errors='replace')}"
        if not self._stream:
            try:
                self._exchange.note_usage(json.loads(self._body).get("usage"))
            except ValueError as broken:
                return f"broken response: {broken}"
            return None
        self._exchange.note_usage(self._events.usage)
        if self._events.error is not None:
            return self._events.error
        return None if self._events.done else "stream ended without its last event"

    def _end(self, now_s: float, error: str | None) -> None:
        if self._exchange is None or self._ended is None:
            return
        self._exchange.finished_s = now_s
        self._exchange.error = error
        self._exchange = None
        self.idle_since_s = now_s
        if not self._ended.done():
            self._ended.set_result(None)
