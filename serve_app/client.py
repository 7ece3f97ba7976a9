"""For clients of the service: transports for httpx that reconnect, so that no answer and no event
is lost to a broken connection.

    http = httpx.Client(transport=ReconnectingTransport())
    client = openai.OpenAI(base_url=..., http_client=http)

A POST carries an `Idempotency-Key`, so it can be sent again and is computed once. The events of a
stream are numbered, so a broken stream continues after its last complete event, be it the answer to
a POST or to `GET /v1/requests/{id}/events`. This file needs httpx and nothing else of this
project.
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

# After these errors a stream is resumed. All timeouts are included: a living service is never
# silent for longer than its `ingress.heartbeat_s`, so silence may mean a node without power, and
# resuming computes nothing again.
_BROKEN = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.TimeoutException)


class AnswerStream(httpx.AsyncByteStream, httpx.SyncByteStream):
    """The events of one answer, over all its connections."""

    def __init__(self, io: Io, first: httpx.Request, response: httpx.Response) -> None:
        self._io, self._first, self._request_id = io, first, request_id_of(response)
        self._clock, self._closed = RetryClock(io.give_up_after_s), False
        self._events = EventSplitter(seen_before(first))
        self._stream: Any = response.stream
        self._steps = self._follow(response)

    async def _follow(self, response: httpx.Response) -> AsyncGenerator[bytes, None]:
        first: httpx.TransportError | None = None  # the first failure since something arrived
        while True:
            failure: httpx.TransportError | None = None
            chunks = self._io.chunks(self._stream)
            try:
                while (chunk := await done(self._io.next(chunks, None))) is not None:
                    for event in self._events.feed(chunk):
                        # comments count too: they show that the request is alive
                        self._clock.restart()
                        first = None
                        yield event
            except _BROKEN as error:
                failure = error
            # Without one of these, HTTP/1 cannot distinguish the end of a body from a broken
            # connection.
            framed = {"transfer-encoding", "content-length"} & response.headers.keys()
            whole = framed or response.status_code == 204 or response.http_version >= "HTTP/2"
            if self._events.finished or (
                whole and failure is None and not self._events.part.strip()
            ):
                return
            broken = httpx.RemoteProtocolError("The connection ended before the stream did.")
            first = first or failure or broken
            response = await self._reconnect(first)

    async def _reconnect(self, failure: httpx.TransportError) -> httpx.Response:
        self._events.part = b""
        while True:
            await done(self._io.close(self._stream))
            pause_s = self._clock.pause_s()
            if pause_s is None or self._closed or not self._events.numbered:
                raise failure
            await done(self._io.pause(pause_s))
            try:
                rest = rest_of(self._first, self._request_id, self._events.last)
                response = await done(self._io.send(rest))
                self._stream = response.stream
                if self._closed:  # closed by another thread while this one connected
                    continue
                if is_stream(response) or response.status_code == 204:  # nothing is left
                    return response
                body = await read(self._io, self._stream)
            except _BROKEN:
                continue
            if error := refusal(response, body):
                raise error from failure

    def __aiter__(self) -> AsyncGenerator[bytes, None]:
        # Iterating again continues at the same place: the SDK reads on after [DONE].
        return self._steps

    def __iter__(self) -> Iterator[bytes]:
        with suppress(StopAsyncIteration):
            while True:
                yield run(self._steps.__anext__())

    async def aclose(self) -> None:
        """Close the connection of the moment; there will be no other."""
        self._closed = True
        await done(self._io.close(self._stream))

    def close(self) -> None:
        run(self.aclose())


# Headers of the first request that do not apply to the GET for the rest; Ray's proxy would enforce
# the timeout with a 408.
_OF_THE_FIRST = tuple(
    "accept content- expect idempotency- last-event-id prefer transfer- x-request-timeout-".split()
)


def is_repeatable(request: httpx.Request) -> bool:
    """Whether it may be sent again: a POST by its key, and a GET of a request's events."""
    path = request.url.path
    if request.method == "GET":
        return "/v1/requests/" in path and path.endswith("/events")
    return request.method == "POST" and "/v1/" in path


def repeatable(request: httpx.Request) -> httpx.Request:
    """Such a request, whose body has been read; a POST with an `Idempotency-Key`: the caller's or a
    new one.
    """
    headers = request.headers.copy()
    if request.method == "POST":
        headers.setdefault("idempotency-key", str(uuid.uuid4()))
    headers["accept-encoding"] = "identity"  # two halves of compressed streams are not one
    its: Any = {"stream": request.stream, "extensions": request.extensions}
    return httpx.Request(request.method, request.url, headers=headers, **its)


def seen_before(request: httpx.Request) -> int:
    """The number of the last event that the caller has already, or 0."""
    seen = request.headers.get("last-event-id", "")
    return int(seen) if seen.isdecimal() else 0


def rest_of(first: httpx.Request, request_id: str, last: int) -> httpx.Request:
    """The GET for the events after number `last` of the answer to the first request."""
    headers = [one for one in first.headers.multi_items() if not one[0].startswith(_OF_THE_FIRST)]
    headers += [("accept", "text/event-stream"), ("accept-encoding", "identity")]
    headers += [("last-event-id", str(last))]
    before = first.url.raw_path.partition(b"?")[0].rpartition(b"/v1/")[0]
    path = f"/v1/requests/{quote(request_id, safe='')}/events"
    url = first.url.copy_with(raw_path=before + path.encode())
    return httpx.Request("GET", url, headers=headers, extensions=first.extensions)


def is_stream(response: httpx.Response) -> bool:
    return response.status_code == 200 and str(response.headers.get("content-type")).startswith(
        "text/event-stream"
    )


def request_id_of(response: httpx.Response) -> str:
    """The service's id of the request, or "". Ray's Python proxy appends one of its own."""
    return str(response.headers.get("x-request-id", "")).partition(",")[0].strip()


def is_proxy_failure(response: httpx.Response) -> bool:
    """Whether something in front of the service reports that the service is unreachable; the
    service's own answers are for the caller.
    """
    own = any(name.startswith("x-hermes-") for name in response.headers) or request_id_of(
        response
    ).startswith("req_")
    return response.status_code in (500, 502, 503, 504) and not own


def refusal(response: httpx.Response, body: bytes) -> httpx.RemoteProtocolError | None:
    """An answer after which asking for the rest is useless, as an error with the service's own
    message.
    """
    if not 400 <= response.status_code < 500 or response.status_code in (408, 425, 429):
        return None
    said = body[:200].decode(errors="replace")
    with suppress(ValueError, LookupError, TypeError):
        said = json.loads(body)["error"]["message"]
    return httpx.RemoteProtocolError(
        f"The stream cannot go on: {said} (HTTP {response.status_code})"
    )


_COMMENT = b": waiting"
"""After it comes an event that only shows that the service lives: it has no number."""
_FINAL_EVENTS = (
    b"response.completed response.incomplete response.failed message_stop error response".split()
)


class EventSplitter:
    """Splits bytes into complete server-sent events, each number once and in order. A comment is
    passed on as soon as it is complete, and so is an event without a number that only shows that
    the service lives.

    `last` is the number of the last event passed on; `finished`: it was the stream's final event;
    `part`: the bytes of the next event so far. `numbered` is False once an event had no number,
    because the stream then cannot be resumed.
    """

    def __init__(self, last: int = 0) -> None:
        self.last, self.finished, self.numbered, self.part = last, False, True, b""
        self._waiting = False

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The events that this chunk completes; raises `httpx.ProtocolError` if one is missing."""
        self.part += chunk
        while True:
            # Pass on comments without a blank line, which openai's SDK (3.52) would treat as an
            # event without data.
            separator = b"\n" if self.part.startswith((b":", b"\n")) else b"\n\n"
            block, end, rest = self.part.partition(separator)
            if not end:
                return
            self.part = rest
            if block and self._is_new(block):
                yield block + end

    def _is_new(self, block: bytes) -> bool:
        fields = {
            name: value.strip()
            for name, _, value in (line.partition(b":") for line in block.split(b"\n"))
        }
        if not fields.keys() & {b"id", b"event", b"data"}:
            self._waiting = block == _COMMENT
            return True
        waiting, self._waiting = self._waiting, False
        if waiting and b"id" not in fields:
            return True
        final = fields.get(b"data") == b"[DONE]" or fields.get(b"event") in _FINAL_EVENTS
        number = int(fields[b"id"]) if fields.get(b"id", b"").isdigit() else 0
        if number > self.last + 1 or (not number and self.last):
            raise httpx.ProtocolError(
                f"Event {number or 'without a number'} of the stream followed event {self.last}."
            )
        if 0 < number <= self.last:
            if final and not self.finished:
                raise httpx.ProtocolError(
                    f"The stream ends before event {self.last}, which has been received."
                )
            return False
        self.last, self.finished = number, self.finished or final
        self.numbered = self.numbered and number > 0
        return True


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0


class RetryClock:
    """Determines the pause before the next try. Time counts from the first failure after
    `restart`.
    """

    def __init__(self, give_up_after_s: float) -> None:
        self._give_up_after_s = give_up_after_s
        self.restart()

    def restart(self) -> None:
        """The service was reached, so the next failure counts as the first."""
        self._longest_s, self._end_s = FIRST_PAUSE_S, float("inf")

    def pause_s(self) -> float | None:
        """Seconds to wait before the next try; None when it is time to give up."""
        now_s = time.monotonic()
        self._end_s = min(self._end_s, now_s + self._give_up_after_s)
        longest_s, self._longest_s = self._longest_s, min(2 * self._longest_s, LONGEST_PAUSE_S)
        left_s = self._end_s - now_s
        return min(random.uniform(0, longest_s), left_s) if left_s > 0 else None


T = TypeVar("T")


class Io(NamedTuple):
    """The differences between blocking code and asyncio. Each call returns a result or an awaitable
    of one.
    """

    give_up_after_s: float
    send: Callable[[httpx.Request], httpx.Response | Awaitable[httpx.Response]]
    pause: Callable[[float], Any]
    load: Callable[[httpx.Request], Any]
    chunks: Callable[[Any], Any]
    next: Callable[[Any, None], bytes | Awaitable[bytes | None] | None]
    close: Callable[[Any], Any]


async def done(call: T | Awaitable[T]) -> T:
    """The result of a call of `Io`."""
    return await call if isinstance(call, Awaitable) else call


def run(steps: Coroutine[Any, Any, T]) -> T:
    try:
        steps.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("blocking calls left something to wait for")


async def read(io: Io, stream: Any) -> bytes:
    chunks, parts = io.chunks(stream), []
    try:
        while (chunk := await done(io.next(chunks, None))) is not None:
            parts.append(chunk)
    finally:
        await done(io.close(stream))
    return b"".join(parts)


# After these errors a POST is sent again, because the connection failed. Of the timeouts only the
# one for connecting is included: the others mean that the caller will not wait any longer, and an
# answer's headers may come only when all of it is computed. A proxy's refusal and a request that
# httpx cannot send are not included, because the next try would fail in the same way.
_REPEATED = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)


async def _answer(io: Io, request: httpx.Request) -> httpx.Response:
    if not is_repeatable(request):
        return await done(io.send(request))
    await done(io.load(request))
    first, clock = repeatable(request), RetryClock(io.give_up_after_s)
    while True:
        try:
            response = await done(io.send(first))
            if is_stream(response):
                if request_id_of(response) and "content-encoding" not in response.headers:
                    response.stream = AnswerStream(io, first, response)
                return response
            response.stream = httpx.ByteStream(await read(io, response.stream))
        except _REPEATED:
            if (pause_s := clock.pause_s()) is None:
                raise
        else:
            if not is_proxy_failure(response) or (pause_s := clock.pause_s()) is None:
                return response
        await done(io.pause(pause_s))


class ReconnectingTransport(httpx.BaseTransport):
    """Sends a POST again until it is answered, and continues its streamed answer, for an
    `httpx.Client`; the same for a GET of a request's events.

    After `give_up_after_s` seconds of failures it raises the last failure, or the first one if the
    answer was streaming. `transport` sends the requests; the default is an `httpx.HTTPTransport()`.
    """

    def __init__(
        self, *, give_up_after_s: float = 60.0, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._inner = transport or httpx.HTTPTransport()
        send, load, close = self._inner.handle_request, methodcaller("read"), methodcaller("close")
        self._io = Io(give_up_after_s, send, time.sleep, load, iter, next, close)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """As in httpx; raises the last error of the inner transport."""
        return run(_answer(self._io, request))

    def close(self) -> None:
        self._inner.close()


class AsyncReconnectingTransport(httpx.AsyncBaseTransport):
    """The same for an `httpx.AsyncClient` on asyncio; the default transport is an
    `httpx.AsyncHTTPTransport()`.
    """

    def __init__(
        self, *, give_up_after_s: float = 60.0, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._inner = transport or httpx.AsyncHTTPTransport()
        send = self._inner.handle_async_request
        load, close = methodcaller("aread"), methodcaller("aclose")
        self._io = Io(give_up_after_s, send, asyncio.sleep, load, aiter, anext, close)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await _answer(self._io, request)

    async def aclose(self) -> None:
        await self._inner.aclose()
