"""Transports for httpx that reconnect, so that a client of hermes-serve loses no answer and no
event to a broken connection.

    http = httpx.Client(transport=ReconnectingTransport())
    client = openai.OpenAI(base_url=..., http_client=http)

A POST carries an `Idempotency-Key`, so it can be sent again and is computed once. The events of a
stream are numbered, so a broken stream continues after its last complete event, be it the answer to
a POST or to `GET /v1/requests/{id}/events`. This folder needs httpx and nothing else of this
project.
"""

from __future__ import annotations

import asyncio
import time
from operator import methodcaller

import httpx

from .answer_stream import AnswerStream
from .io import Io, done, read, run
from .messages import is_proxy_failure, is_repeatable, is_stream, repeatable, request_id_of
from .retries import RetryClock

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
        send, load, close = (
            self._inner.handle_async_request,
            methodcaller("aread"),
            methodcaller("aclose"),
        )
        self._io = Io(give_up_after_s, send, asyncio.sleep, load, aiter, anext, close)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """As in httpx; raises the last error of the inner transport."""
        return await _answer(self._io, request)

    async def aclose(self) -> None:
        await self._inner.aclose()
