"""Answers to readers: a request's events, for one that reconnects or comes later, and JSON that may
be as large as what is stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app import timings
from serve_app.errors import RequestRefused
from serve_app.ingress.answer import Answer, Answering
from serve_app.ingress.connection_limits import ConnectionLimit
from serve_app.ingress.disconnects import Disconnects
from serve_app.ingress.refusals import refusal_answer
from serve_app.journal.entries import Entry, decode_line, has_ended
from serve_app.journal.ids import REQUEST_ID


class _Reading(Response):
    """Holds a place among `ingress.max_readers` while an ASGI application answers. FastAPI returns
    it unchanged.
    """

    def __init__(self, place: AbstractContextManager[None], answer: ASGIApp) -> None:
        super().__init__()
        self._place = place
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._place:
            await self._answer(scope, receive, send)


class EventStreams:
    """What one ingress needs to serve its readers."""

    def __init__(
        self, disconnects: Disconnects, answering: Answering, connections: ConnectionLimit
    ) -> None:
        self._disconnects = disconnects
        self._answering = answering
        self._unread = answering.unread
        self._making = asyncio.Lock()
        """One at a time: making 6 MB of JSON holds Python's lock for 10 ms again and again."""
        self.connections = connections

    def events(
        self,
        request_id: str,
        tenant: str,
        seen: int,
        entries: list[Entry],
        as_events: bool = True,
    ) -> Response:
        """The response of a request.

        Args:
            seen: the number of the last event that the reader has.
            entries: the outline of the request's journal.
            as_events: whether also an answer that was not streamed comes as an event.
        """

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            if has_ended(entries):
                self._unread.check(tenant)
            answer = await self.attach(request_id, seen, entries, as_events)
            try:
                await answer(scope, receive, send)
            except RequestRefused as refusal:  # as the POST itself would have got it
                refused = refusal_answer(refusal, answer.own_headers())
                await refused(scope, receive, send)

        return _Reading(self.connections.hold(tenant), run)

    def json(self, tenant: str, make: Callable[[], Awaitable[bytes]]) -> Response:
        """An answer in JSON. `make` is called when there is room for another reader, and for what
        it makes.
        """

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            async with self._making:
                self._unread.check(tenant)
                answer = Response(await make(), media_type="application/json")
                size = len(answer.body) if len(answer.body) > timings.LARGE_BYTES else 0
                self._unread.count(tenant, size)
            try:
                await answer(scope, receive, send)
            finally:
                self._unread.release(tenant, size)

        return _Reading(self.connections.hold(tenant), run)

    async def attach(
        self, request_id: str, seen: int, entries: list[Entry], as_events: bool
    ) -> Answer:
        """The answer with the events after number `seen`.

        Raises:
            RedisUnavailable: Redis cannot be reached.
        """
        follower = await self._disconnects.attach(request_id, seen, has_ended(entries))
        path = decode_line(entries[0]).path if entries[0].id == REQUEST_ID else ""
        facts = follower.reader.facts
        streamed = as_events or (facts is not None and facts.streamed)
        return Answer(self._answering, follower, path, facts, streamed, as_events)
