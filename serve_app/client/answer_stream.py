"""The events of one answer, continued over new connections."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from typing import Any

import httpx

from .events import EventSplitter
from .io import Io, done, read, run
from .messages import is_stream, refusal, request_id_of, rest_of, seen_before
from .retries import RetryClock

# After these errors a stream is resumed. All timeouts are included: a living service is never
# silent for longer than its `ingress.heartbeat_s`, so silence may mean a node without power, and
# resuming computes nothing again.
_BROKEN = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.TimeoutException)


class AnswerStream(httpx.AsyncByteStream, httpx.SyncByteStream):
    """The events of one answer, over all its connections."""

    def __init__(self, io: Io, first: httpx.Request, response: httpx.Response) -> None:
        self._io, self._first, self._request_id = io, first, request_id_of(response)
        self._clock, self._events, self._closed = (
            RetryClock(io.give_up_after_s),
            EventSplitter(seen_before(first)),
            False,
        )
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
            framed = response.status_code == 204 or (
                {"transfer-encoding", "content-length"} & response.headers.keys()
            )
            ended = (
                failure is None
                and (framed or response.http_version >= "HTTP/2")
                and not self._events.part.strip()
            )
            if self._events.finished or ended:
                return
            first = (
                first
                or failure
                or httpx.RemoteProtocolError("The connection ended before the stream did.")
            )
            response = await self._reconnect(first)

    async def _reconnect(self, failure: httpx.TransportError) -> httpx.Response:
        self._events.part = b""
        while True:
            await done(self._io.close(self._stream))
            if (
                (pause_s := self._clock.pause_s()) is None
                or self._closed
                or not self._events.numbered
            ):
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
        return (
            self._steps
        )  # iterating again continues at the same place: the SDK reads on after [DONE]

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
