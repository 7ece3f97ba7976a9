"""Transports for httpx that reconnect: what breaks on the way costs a client of hermes-serve no answer and no event.

    client = openai.OpenAI(base_url=..., http_client=httpx.Client(transport=ReconnectingTransport()))

A POST carries an `Idempotency-Key`, so it can be sent again and is computed once. The events of a stream are numbered,
so a broken stream goes on behind its last whole event. Needs httpx, and nothing else of this project.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from operator import methodcaller
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import httpx

T = TypeVar("T")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0

# After these a POST is sent again: the connection failed. Of the timeouts only that of connecting is among them: the
# others say that the caller will wait no longer, and an answer's headers may only come when all of it is computed.
# Nor are a proxy's refusal and what httpx itself cannot send: the next try would end like this one.
_REPEATED = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)
# After these a stream goes on. All timeouts are among them: a living service is never silent for longer than its
# `ingress.heartbeat_s`, so silence is all that is ever heard of a node without power; and nothing is computed again.
_BROKEN = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.TimeoutException)

_FINAL_EVENTS = (b"response.completed", b"response.incomplete", b"response.failed", b"error", b"response")
# What would be wrong on the GET for the rest; Ray's proxy would obey the timeout with a plain 408.
_OF_THE_POST = ("accept", "content-", "expect", "idempotency-", "prefer", "transfer-", "x-request-timeout-")


class RetryClock:
    """Says how long to pause before the next try. Time counts from the first failure after `restart`."""

    def __init__(self, give_up_after_s: float) -> None:
        self._give_up_after_s = give_up_after_s
        self.restart()

    def restart(self) -> None:
        """The service was reached: the next failure is a first one again."""
        self._longest_s, self._end_s = FIRST_PAUSE_S, float("inf")

    def pause_s(self) -> float | None:
        """Seconds to wait before the next try; None when it is time to give up."""
        now_s = time.monotonic()
        self._end_s = min(self._end_s, now_s + self._give_up_after_s)
        longest_s, self._longest_s = self._longest_s, min(2 * self._longest_s, LONGEST_PAUSE_S)
        return min(random.uniform(0, longest_s), self._end_s - now_s) if now_s < self._end_s else None


class EventSplitter:
    """Makes whole server-sent events of bytes, each number once and in order. Comments pass as soon as they are whole.

    `last` is the number of the last event handed on; `finished`: it was the stream's final one; `part`: what came of
    the next. `numbered` is False once an event had no number, so that nobody can say where the stream has to go on.
    """

    def __init__(self) -> None:
        self.last, self.finished, self.numbered, self.part = 0, False, True, b""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The events that are complete with this chunk; raises `httpx.ProtocolError` where one is missing."""
        self.part += chunk
        while True:
            # Comments go without a blank line behind them, which openai's SDK (3.52) takes for an event without data.
            separator = b"\n" if self.part.startswith((b":", b"\n")) else b"\n\n"
            block, end, rest = self.part.partition(separator)
            if not end:
                return
            self.part = rest
            if block and self._is_new(block):
                yield block + end

    def _is_new(self, block: bytes) -> bool:
        fields = {name: value.strip() for name, _, value in (line.partition(b":") for line in block.split(b"\n"))}
        if not fields.keys() & {b"id", b"event", b"data"}:
            return True
        final = fields.get(b"data") == b"[DONE]" or fields.get(b"event") in _FINAL_EVENTS
        number = int(fields[b"id"]) if fields.get(b"id", b"").isdigit() else 0
        if number > self.last + 1 or (not number and self.last):
            raise httpx.ProtocolError(f"Event {number or 'without a number'} of the stream followed event {self.last}.")
        if 0 < number <= self.last:
            if final and not self.finished:
                raise httpx.ProtocolError(f"The stream ends before event {self.last}, which has been received.")
            return False
        self.last, self.numbered, self.finished = number, self.numbered and number > 0, self.finished or final
        return True


def with_key(post: httpx.Request) -> httpx.Request:
    """The request, whose body has been read, with an `Idempotency-Key`: the caller's or a new one."""
    headers = post.headers.copy()
    headers.setdefault("idempotency-key", str(uuid.uuid4()))
    headers["accept-encoding"] = "identity"  # the halves of two compressed streams do not make one
    return httpx.Request("POST", post.url, headers=headers, stream=post.stream, extensions=post.extensions)


def rest_of(post: httpx.Request, request_id: str, last: int) -> httpx.Request:
    """The GET for what comes behind event number `last` of the answer."""
    headers = [item for item in post.headers.multi_items() if not item[0].startswith(_OF_THE_POST)]
    headers += [("accept", "text/event-stream"), ("accept-encoding", "identity"), ("last-event-id", str(last))]
    before = post.url.raw_path.partition(b"?")[0].rpartition(b"/v1/")[0]
    url = post.url.copy_with(raw_path=before + f"/v1/requests/{quote(request_id, safe='')}/events".encode())
    return httpx.Request("GET", url, headers=headers, extensions=post.extensions)


def is_stream(response: httpx.Response) -> bool:
    """Whether the answer is server-sent events."""
    return response.status_code == 200 and str(response.headers.get("content-type")).startswith("text/event-stream")


def request_id_of(response: httpx.Response) -> str:
    """The service's id of the request, or "". Ray's Python proxy puts one of its own behind it."""
    return str(response.headers.get("x-request-id", "")).partition(",")[0].strip()


def is_proxy_failure(response: httpx.Response) -> bool:
    """Whether something before the service says that it is away; the service's own answers are for the caller."""
    own = any(name.startswith("x-hermes-") for name in response.headers) or request_id_of(response).startswith("req_")
    return response.status_code in (500, 502, 503, 504) and not own


def refusal(response: httpx.Response, body: bytes) -> httpx.RemoteProtocolError | None:
    """An answer after which asking for the rest again is no use, as an error with the service's own words."""
    if not 400 <= response.status_code < 500 or response.status_code in (408, 425, 429):
        return None
    said = body[:200].decode(errors="replace")
    with suppress(ValueError, LookupError, TypeError):
        said = json.loads(body)["error"]["message"]
    return httpx.RemoteProtocolError(f"The stream cannot go on: {said} (HTTP {response.status_code})")


class _Io(NamedTuple):
    """What differs between blocking and asyncio. Each call returns a result, or an awaitable of one."""

    give_up_after_s: float
    send: Callable[[httpx.Request], httpx.Response | Awaitable[httpx.Response]]
    pause: Callable[[float], Any]
    load: Callable[[httpx.Request], Any]
    chunks: Callable[[Any], Any]
    next: Callable[[Any, None], bytes | Awaitable[bytes | None] | None]
    close: Callable[[Any], Any]


async def _done(call: T | Awaitable[T]) -> T:
    return await call if isinstance(call, Awaitable) else call


def _run(steps: Coroutine[Any, Any, T]) -> T:
    try:
        steps.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("blocking calls left something to wait for")


async def _answer(io: _Io, request: httpx.Request) -> httpx.Response:
    if request.method != "POST" or "/v1/" not in request.url.path:
        return await _done(io.send(request))
    await _done(io.load(request))
    post, clock = with_key(request), RetryClock(io.give_up_after_s)
    while True:
        try:
            response = await _done(io.send(post))
            if is_stream(response):
                if request_id_of(response) and "content-encoding" not in response.headers:
                    response.stream = _Stream(io, post, response)
                return response
            response.stream = httpx.ByteStream(await _read(io, response.stream))
        except _REPEATED:
            if (pause_s := clock.pause_s()) is None:
                raise
        else:
            if not is_proxy_failure(response) or (pause_s := clock.pause_s()) is None:
                return response
        await _done(io.pause(pause_s))


async def _read(io: _Io, stream: Any) -> bytes:
    chunks, parts = io.chunks(stream), []
    try:
        while (chunk := await _done(io.next(chunks, None))) is not None:
            parts.append(chunk)
    finally:
        await _done(io.close(stream))
    return b"".join(parts)


class _Stream(httpx.AsyncByteStream, httpx.SyncByteStream):
    """The events of one answer over all its connections."""

    def __init__(self, io: _Io, post: httpx.Request, response: httpx.Response) -> None:
        self._io, self._post, self._request_id = io, post, request_id_of(response)
        self._clock, self._events, self._closed = RetryClock(io.give_up_after_s), EventSplitter(), False
        self._stream: Any = response.stream
        self._steps = self._follow(response)

    async def _follow(self, response: httpx.Response) -> AsyncGenerator[bytes, None]:
        first: httpx.TransportError | None = None  # failure since something came
        while True:
            failure: httpx.TransportError | None = None
            chunks = self._io.chunks(self._stream)
            try:
                while (chunk := await _done(self._io.next(chunks, None))) is not None:
                    for event in self._events.feed(chunk):
                        self._clock.restart()  # for comments too: they say that the request lives
                        first = None
                        yield event
            except _BROKEN as error:
                failure = error
            # Without either of these, HTTP/1 cannot tell the end of a body from a broken connection.
            framed = {"transfer-encoding", "content-length"} & response.headers.keys()
            ended = failure is None and (framed or response.http_version >= "HTTP/2") and not self._events.part.strip()
            if self._events.finished or ended:
                return
            first = first or failure or httpx.RemoteProtocolError("The connection ended before the stream did.")
            response = await self._reconnect(first)

    async def _reconnect(self, failure: httpx.TransportError) -> httpx.Response:
        self._events.part = b""
        while True:
            await _done(self._io.close(self._stream))
            if (pause_s := self._clock.pause_s()) is None or self._closed or not self._events.numbered:
                raise failure
            await _done(self._io.pause(pause_s))
            try:
                rest = rest_of(self._post, self._request_id, self._events.last)
                response = await _done(self._io.send(rest))
                self._stream = response.stream
                if self._closed:  # by another thread, while this one connected
                    continue
                if is_stream(response):
                    return response
                body = await _read(self._io, self._stream)
            except _BROKEN:
                continue
            if error := refusal(response, body):
                raise error from failure

    def __aiter__(self) -> AsyncGenerator[bytes, None]:
        return self._steps  # who iterates again goes on where he stopped: the SDK reads on behind [DONE]

    def __iter__(self) -> Iterator[bytes]:
        with suppress(StopAsyncIteration):
            while True:
                yield _run(self._steps.__anext__())

    async def aclose(self) -> None:
        self._closed = True
        await _done(self._io.close(self._stream))

    def close(self) -> None:
        _run(self.aclose())


class ReconnectingTransport(httpx.BaseTransport):
    """Sends a POST again until it is answered, and continues its streamed answer, for an `httpx.Client`.

    After `give_up_after_s` seconds of failures the last one is raised, or the first one if the answer was streaming.
    `transport` sends; by default it is an `httpx.HTTPTransport()`.
    """

    def __init__(self, *, give_up_after_s: float = 60.0, transport: httpx.BaseTransport | None = None) -> None:
        self._inner = transport or httpx.HTTPTransport()
        send, load, close = self._inner.handle_request, methodcaller("read"), methodcaller("close")
        self._io = _Io(give_up_after_s, send, time.sleep, load, iter, next, close)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """As httpx has it; raises what the inner transport raised last."""
        return _run(_answer(self._io, request))

    def close(self) -> None:
        """Close the inner transport."""
        self._inner.close()


class AsyncReconnectingTransport(httpx.AsyncBaseTransport):
    """The same for an `httpx.AsyncClient` on asyncio; by default over `httpx.AsyncHTTPTransport()`."""

    def __init__(self, *, give_up_after_s: float = 60.0, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._inner = transport or httpx.AsyncHTTPTransport()
        send, load, close = self._inner.handle_async_request, methodcaller("aread"), methodcaller("aclose")
        self._io = _Io(give_up_after_s, send, asyncio.sleep, load, aiter, anext, close)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """As httpx has it; raises what the inner transport raised last."""
        return await _answer(self._io, request)

    async def aclose(self) -> None:
        """Close the inner transport."""
        await self._inner.aclose()
