"""Disconnects clients that do not read their answer.

What such a client costs is bounded (`sending.py`), but it occupies a connection, and a reader's
place. After `ingress.stalled_client_timeout_s` in which it has taken nothing it is disconnected and
counts as a client that has left. One that takes a little all the time may take as long as it likes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app import timings
from serve_app.clock import SYSTEM
from serve_app.ingress.answer import Answer
from serve_app.ingress.sending import Paced
from serve_app.loops import Loops

log = logging.getLogger("hermes.ingress")


class _Sending(Protocol):
    """An answer that is being sent; see `Paced`."""

    sending_since_s: float

    def cut(self) -> None: ...


class SlowReaders:
    """Watches all answers of one ingress.

    Args:
        stalled_s: seconds without a byte after which a client is disconnected.
    """

    def __init__(self, stalled_s: float, loops: Loops) -> None:
        self._stalled_s = stalled_s
        self._sending: set[_Sending] = set()
        self._loops = loops

    async def start(self) -> None:
        self._loops.keep("stalled-readers", self._watch)

    async def serve(self, answer: Answer, scope: Any, receive: Any, send: Send) -> None:
        """Run an answer, which sends pieces by itself, to its end, or until its client is
        disconnected.
        """
        with self._watched(answer):
            await answer(scope, receive, send)

    async def paced(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Run an application that may send messages of any size, in the same way."""
        task, paced = asyncio.current_task(), Paced(send)
        try:
            with self._watched(paced):
                await app(scope, receive, paced)
        except asyncio.CancelledError:
            if not paced.was_cut or task is None:
                raise
            task.uncancel()
            log.info("%s: the client does not read and is disconnected", scope["path"])

    @contextmanager
    def _watched(self, sending: _Sending) -> Iterator[None]:
        self._sending.add(sending)
        try:
            yield
        finally:
            self._sending.discard(sending)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(timings.STALLED_LOOK_AT_MOST_S, self._stalled_s / 4))
            since_s = SYSTEM.monotonic_s() - self._stalled_s
            for one in [one for one in self._sending if one.sending_since_s < since_s]:
                one.cut()
