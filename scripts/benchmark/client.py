"""A lean HTTP/1.1 client for streamed chats: it shares its cores with the server that it measures,
so it wakes no coroutine per token and parses JSON only where an event can decide something.
"""

import asyncio
import json
import random
import time
from array import array
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import httptools

_WORDS = (
    "the river carries a letter from every harbour while seven clocks argue about rain and "
    "bread copper lanterns remember quiet engines under green mountains where nobody counts"
).split()
# Which field carries the first tokens of a reasoning model differs between servers.
_TEXT_FIELDS = ("content", "reasoning", "reasoning_content", "tool_calls")
# Servers close idle connections (uvicorn after 5 s); one that is older is not worth the race.
_REUSE_WITHIN_S = 2.0
_PAUSE_S = 0.2
_FETCH_TIMEOUT_S = 5.0


def fetch(url: str, api_key: str = "") -> str:
    """What a GET answers now; empty if that is not a 200."""
    request = Request(url, headers={"authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        # No proxy: what is measured is on this machine, or named by its own address.
        with build_opener(ProxyHandler({})).open(request, timeout=_FETCH_TIMEOUT_S) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


@dataclass(frozen=True)
class Shape:
    """What every request of a run looks like, but for its words."""

    model: str
    max_tokens: int
    prompt_chars: int


class RequestMaker:
    """Makes one request after another for one server, equal for equal seeds."""

    def __init__(self, url: str, api_key: str, shape: Shape, seed: int) -> None:
        parts = urlsplit(url)
        self.host = parts.hostname or "127.0.0.1"
        self.port = parts.port or 80
        self.shape = shape
        self._rng = random.Random(seed)
        self._head = (
            f"POST {parts.path.rstrip('/')}/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\n"
            f"content-type: application/json\r\nauthorization: Bearer {api_key}\r\n"
        ).encode()

    def next(self, max_tokens: int = 0) -> bytes:
        """The bytes of the next request: header and body; ``max_tokens`` for this one only."""
        asked = {
            "model": self.shape.model,
            "temperature": 0,
            "messages": [{"role": "user", "content": _words(self._rng, self.shape.prompt_chars)}],
            "max_tokens": max_tokens or self.shape.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            # vLLM's own extension: every request then has one length, on every system.
            "ignore_eos": True,
        }
        body = json.dumps(asked, separators=(",", ":")).encode()
        return self._head + f"content-length: {len(body)}\r\n\r\n".encode() + body


def _words(rng: random.Random, length_chars: int) -> str:
    """Exactly ``length_chars`` characters of words (at least one)."""
    return " ".join(rng.choices(_WORDS, k=length_chars // 3 + 1))[: max(1, length_chars)]


class EventCounter:
    """Fed the body of one streamed response in pieces of any size; says how many tokens' events
    each held.

    After the first token an event is only counted, not parsed. The true number of tokens comes
    from the ``usage`` event at the end.
    """

    def __init__(self) -> None:
        self.done = False
        self.error: str | None = None
        self.usage: dict[str, Any] | None = None
        self._rest = b""
        self._seen_token = False

    def feed(self, piece: bytes) -> int:
        """Take the next bytes of the body; return the number of token events completed by them."""
        if self._rest:
            piece = self._rest + piece
        if b"\r" in piece:
            piece = piece.replace(b"\r\n", b"\n")
        end = piece.rfind(b"\n\n")
        if end < 0:
            self._rest = piece
            return 0
        self._rest = piece[end + 2 :]
        tokens = 0
        for event in piece[:end].split(b"\n\n"):
            data = _data_of(event)
            if data and self._counts(data):
                tokens += 1
        return tokens

    def _counts(self, data: bytes) -> bool:
        if data == b"[DONE]":
            self.done = True
            return False
        if data.startswith(b'{"error"'):
            error = json.loads(data)["error"]
            said = error.get("message", error) if isinstance(error, dict) else error
            self.error = f"error event: {str(said)[:200]}"
            return False
        # A quoted "usage" inside generated text is escaped, so this finds only the field itself.
        if self._seen_token and b'"usage"' not in data:
            return True
        event = json.loads(data)
        self.usage = event.get("usage") or self.usage
        self._seen_token = self._seen_token or _made_by_token(event)
        return self._seen_token and bool(event.get("choices"))


def _data_of(event: bytes) -> bytes:
    """The payload of an event's ``data:`` line; empty for comments and events without one."""
    start = 0 if event.startswith(b"data:") else event.find(b"\ndata:") + 1
    if not event.startswith(b"data:", start):
        return b""
    end = event.find(b"\n", start)
    return (event[start + 5 :] if end < 0 else event[start + 5 : end]).strip()


def _made_by_token(event: dict[str, Any]) -> bool:
    """Whether a token caused this event: all do but the one that opens a chat with the role alone.

    An empty text counts: the bytes of one character can be spread over several tokens.
    """
    for choice in event.get("choices") or []:
        delta = choice.get("delta")
        if delta is None or "role" not in delta or any(delta.get(field) for field in _TEXT_FIELDS):
            return True
    return False


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
        """Take the server's own count of tokens."""
        self.tokens = self.events if usage is None else usage.get("completion_tokens", 0)
        self.prompt_tokens = 0 if usage is None else usage.get("prompt_tokens", 0)


class HttpConnection(asyncio.Protocol):
    """A keep-alive connection; ``perform`` sends one request and returns when its response has
    ended.
    """

    def __init__(self) -> None:
        self.idle_since_s = 0.0
        self.reusable = True
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._ended: asyncio.Future[None] | None = None
        self._arrived = 0
        self._complete = False

    async def perform(self, request: bytes, exchange: Exchange) -> None:
        """Send ``request`` and fill ``exchange`` in; what went wrong is in ``exchange.error``."""
        assert self._transport is not None
        self._exchange = exchange
        self._events = EventCounter()
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
        """asyncio's callback; the event loop sets TCP_NODELAY."""
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
        if self._arrived:
            self._exchange.note_tokens(now_s, self._arrived)
            self._arrived = 0
        if self._complete:
            self._complete = False
            self._end(now_s, self._verdict())

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """httptools' callback, once per HTTP chunk."""
        if self._status != 200:
            self._body += body
            return
        self._arrived += self._events.feed(body)
        if self._exchange is not None and self._exchange.body is not None:
            self._exchange.body += body

    def on_message_complete(self) -> None:
        """httptools' callback; not called when the body stops short."""
        self._complete = True
        self.reusable = self.reusable and self._parser.should_keep_alive()

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._end(time.perf_counter(), "connection closed before the response ended")

    def _verdict(self) -> str | None:
        if self._status != 200:
            return f"HTTP {self._status}: {bytes(self._body[:160]).decode(errors='replace')}"
        assert self._exchange is not None
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


class ConnectionPool:
    """As many connections to one server as there are requests under way; each request gets one to
    itself.
    """

    def __init__(self, maker: RequestMaker, timeout_s: float) -> None:
        self._host, self._port = maker.host, maker.port
        self._timeout_s = timeout_s
        self._idle: list[HttpConnection] = []

    async def perform(self, request: bytes, exchange: Exchange) -> None:
        """Send ``request`` and fill ``exchange`` in; what went wrong is in ``exchange.error``."""
        connection: HttpConnection | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._connection()
                await connection.perform(request, exchange)
        except asyncio.CancelledError:
            if connection is not None:
                connection.close()
            raise
        except TimeoutError:
            exchange.error = f"no end within {self._timeout_s:g} s"
        except OSError as refused:
            exchange.error = f"cannot connect: {refused}"
            # A refusal comes at once: without a pause a closed loop would turn into a busy loop.
            await asyncio.sleep(_PAUSE_S)
        exchange.finished_s = exchange.finished_s or time.perf_counter()
        if connection is not None and exchange.error is None and connection.reusable:
            self._idle.append(connection)
        elif connection is not None:
            connection.close()

    def close(self) -> None:
        """Close what is idle."""
        for connection in self._idle:
            connection.close()

    async def _connection(self) -> HttpConnection:
        while self._idle:
            connection = self._idle.pop()
            idle_s = time.perf_counter() - connection.idle_since_s
            if connection.reusable and idle_s < _REUSE_WITHIN_S:
                return connection
            connection.close()
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(HttpConnection, self._host, self._port))[1]
