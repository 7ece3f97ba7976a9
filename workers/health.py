"""Whether the engine of a worker can serve."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from serve_app import timings
from workers.engine import Engine, EngineFailed


class EngineHealth:
    """The health of one engine. An engine that was found sick stays sick.

    Args:
        on_sick: called once, with the error that the engine's own check raised.
    """

    def __init__(self, engine: Engine, on_sick: Callable[[Exception], Awaitable[None]]) -> None:
        self._engine = engine
        self._on_sick = on_sick
        self.sick: asyncio.Future[None] = asyncio.Future()
        """Done when the engine is sick."""

    def check(self) -> None:
        """Raise `EngineFailed` if the engine was found sick."""
        if self.sick.done():
            raise EngineFailed("the engine has failed")

    async def examine(self) -> None:
        try:
            await self._engine.check_health()
        except Exception as error:
            if not self.sick.done():
                self.sick.set_result(None)
                await self._on_sick(error)

    async def watch(self) -> None:
        """Check the engine forever, because Serve's own checks take many seconds."""
        while True:
            await asyncio.sleep(timings.HEALTH_LOOK_S)
            if not self.sick.done():
                await self.examine()
