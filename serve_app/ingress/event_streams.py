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
from serve_app.ingress.connection_limits import ConnectionLimits
from serve_app.ingress.exchange import Exchanges
from serve_app.requests.lifecycle import Record


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

    def __init__(self, exchanges: Exchanges, limits: ConnectionLimits) -> None:
        self._exchanges = exchanges
        self._unread = limits.unread
        self._making = asyncio.Lock()
        """One at a time: making 6 MB of JSON holds Python's lock for 10 ms again and again."""
        self.connections = limits.event_readers

    def events(
        self,
        request_id: str,
        tenant: str,
        seen: int,
        record: Record,
        as_events: bool = True,
    ) -> Response:
        """The response of a request after event `seen`. `record`: what is known of it.
        `as_events`: whether also an answer that was not streamed comes as an event.
        """

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            if record.ended:
                self._unread.check(tenant)
            its = request_id, record.path, seen, record.ended
            exchange = await self._exchanges.attach(*its, as_events)
            await exchange(scope, receive, send)

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
