"""Validates bodies: small ones at once, large ones in a thread, one at a time.

Validating a large body takes many short steps, and the event loop runs between them. Two such
threads would compete with each other and with the loop for the interpreter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from serve_app.ingress.validation.bodies import parse
from serve_app.ingress.validation.context import check_context
from serve_app.policy.capacity import spare_slots
from serve_app.settings import Settings

_AT_ONCE_BYTES = 64 * 1024


class Validator:
    """Validates the bodies of one ingress's requests."""

    def __init__(self, settings: Settings) -> None:
        self._model = settings.model.name
        at_once = settings.workers.max_running_requests
        most = min(settings.limits.max_sequences, at_once - spare_slots(at_once))
        self._limits = settings.limits.model_copy(update={"max_sequences": most})
        self.most_tokens = 0
        """Of a prompt and its answer, as the engines report; 0 if none does."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="validator")

    async def parse(self, path: str, body: bytes) -> Mapping[str, Any]:
        """See `bodies.parse` and `context.check_context`.

        Raises:
            RequestRefused: as there; `context_length_exceeded`.
        """
        if len(body) <= _AT_ONCE_BYTES:
            request = parse(path, body, self._model, self._limits)
        else:
            loop = asyncio.get_running_loop()
            request = await loop.run_in_executor(
                self._thread, parse, path, body, self._model, self._limits
            )
        check_context(path, request, self.most_tokens)
        return request

    def stop(self) -> None:
        """End the thread; waiting bodies are no longer validated."""
        self._thread.shutdown(wait=False, cancel_futures=True)
