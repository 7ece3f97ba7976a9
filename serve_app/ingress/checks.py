"""Where bodies are checked: small ones at once, large ones beside the event loop, one at a time.

A check of a large body is many short steps, and between them the loop takes its turn. Two of them at a time would take
each other's turns, and the loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from serve_app.ingress.validation import parse
from serve_app.settings import Settings

_AT_ONCE_BYTES = 64 * 1024


class Checks:
    """The checks of one ingress."""

    def __init__(self, settings: Settings) -> None:
        self._model = settings.model.name
        self._limits = settings.limits
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="check")

    async def parse(self, path: str, body: bytes) -> Mapping[str, Any]:
        """See `validation.parse`.

        Raises:
            RequestRefused: as there.
        """
        if len(body) <= _AT_ONCE_BYTES:
            return parse(path, body, self._model, self._limits)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, parse, path, body, self._model, self._limits)

    def stop(self) -> None:
        """End the thread; what waits for it is not checked any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)
