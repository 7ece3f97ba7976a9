"""Answers in JSON that may be as large as what is stored: a journal, or a request's body."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import Response

from serve_app.ingress.event_streams import EventStreams

log = logging.getLogger("hermes.ingress")


class LargeAnswer(Response):
    """Whoever asks counts as a reader of events until it has the answer, and is disconnected if it
    does not take it; FastAPI returns this unchanged.

    Args:
        make: the answer as JSON; it is called when there is room for another reader.
    """

    def __init__(
        self, streams: EventStreams, tenant: str, make: Callable[[], Awaitable[bytes]]
    ) -> None:
        super().__init__()
        self._streams = streams
        self._tenant = tenant
        self._make = make

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with self._streams.connections.hold(self._tenant):
            answer = Response(await self._make(), media_type="application/json")
            try:
                async with asyncio.timeout(self._streams.slow_readers.stalled_s):
                    await answer(scope, receive, send)
            except TimeoutError:
                log.info("%s: the client does not take the answer", scope["path"])
