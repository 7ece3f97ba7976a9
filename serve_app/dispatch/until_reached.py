"""Steps that must be completed: each is repeated until Redis has answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from serve_app import timings
from serve_app.errors import RedisUnavailable
from serve_app.loops import jittered
from serve_app.observability.logs import Outage

log = logging.getLogger("hermes.dispatcher")

T = TypeVar("T")


class UntilReached:
    """Repeats a step while Redis cannot be reached. An outage is logged once for all steps."""

    def __init__(self) -> None:
        self._outage = Outage(log, "dispatcher: waiting for Redis")

    async def __call__(self, step: Callable[[], Awaitable[T]]) -> T:
        """Returns the step's result eventually; raises every error other than
        `RedisUnavailable`.
        """
        while True:
            try:
                result = await step()
            except RedisUnavailable as error:
                self._outage.failed(error)
                await asyncio.sleep(jittered(timings.ATTEMPT_RETRY_S))
            else:
                self._outage.over()
                return result
