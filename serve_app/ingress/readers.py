"""The clients that are being answered, and who of them takes nothing.

A server hands on no more than a socket takes (uvicorn's `send` waits), so who does not read holds little; but it holds
its place. After `ingress.stalled_reader_s` without a byte it is cut, and counts as a client that has left.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from serve_app.ingress.answer import Answer, Send
from serve_app.ingress.places import Places
from serve_app.loops import Loops
from serve_app.settings import Settings

_LOOK_AT_MOST_S = 5.0


class Readers:
    """Of one ingress."""

    def __init__(self, settings: Settings, loops: Loops) -> None:
        ingress = settings.ingress
        share = ingress.max_tenant_share if settings.auth.required else 1.0
        self.connections = Places("connections", ingress.max_connections, int(share * ingress.max_connections))
        self.of_events = Places("readers of events", ingress.max_readers, int(share * ingress.max_readers))
        self._stalled_s = ingress.stalled_reader_s
        self._answers: set[Answer] = set()
        self._loops = loops
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to look for who takes nothing."""
        self._watching = self._loops.keep("stalled-readers", self._watch)

    async def stop(self) -> None:
        """Cut nobody any more."""
        if self._watching is not None:
            await self._loops.end(self._watching)

    async def serve(self, answer: Answer, scope: Any, receive: Any, send: Send) -> None:
        """Run an answer to its end, or until its client has taken nothing for too long."""
        self._answers.add(answer)
        try:
            await answer(scope, receive, send)
        finally:
            self._answers.discard(answer)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(_LOOK_AT_MOST_S, self._stalled_s / 4))
            since_s = time.monotonic() - self._stalled_s
            for answer in [one for one in self._answers if one.sending_since_s < since_s]:
                answer.cut()
