"""Disconnects clients that do not read their answer.

uvicorn's `send` waits until the socket takes the bytes, so a client that does not read costs little
memory, but it occupies a connection. After `ingress.stalled_reader_s` without a byte it is
disconnected and counts as a client that has left.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Send

from serve_app import timings
from serve_app.clock import SYSTEM
from serve_app.ingress.answer import Answer
from serve_app.loops import Loops


class SlowReaders:
    """Watches all answers of one ingress.

    Args:
        stalled_s: seconds without a byte after which a client is disconnected.
    """

    def __init__(self, stalled_s: float, loops: Loops) -> None:
        self.stalled_s = stalled_s
        self._answers: set[Answer] = set()
        self._loops = loops

    async def start(self) -> None:
        self._loops.keep("stalled-readers", self._watch)

    async def serve(self, answer: Answer, scope: Any, receive: Any, send: Send) -> None:
        """Run an answer to its end, or until its client is disconnected."""
        self._answers.add(answer)
        try:
            await answer(scope, receive, send)
        finally:
            self._answers.discard(answer)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(timings.STALLED_LOOK_AT_MOST_S, self.stalled_s / 4))
            since_s = SYSTEM.monotonic_s() - self.stalled_s
            for answer in [one for one in self._answers if one.sending_since_s < since_s]:
                answer.cut()
