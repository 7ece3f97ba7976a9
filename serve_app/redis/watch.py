"""Whether Redis can be used, as one ingress knows it: tried at the start, after every outage, and
every few seconds, because an operator may take a right away at any time.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from serve_app import timings
from serve_app.loops import Loops, jittered
from serve_app.redis.check import Check, Finding
from serve_app.settings import RedisSettings

log = logging.getLogger("hermes.redis")


class RedisWatch:
    """The result of the last try."""

    def __init__(self, settings: RedisSettings, namespace: str, loops: Loops) -> None:
        self._check = Check(settings, namespace)
        self._loops = loops
        self._task: asyncio.Task[None] | None = None
        self._again = asyncio.Event()
        self._said = ""
        self.usable = False
        """Whether everything was possible, and Redis has not been lost since."""
        self.refused = ""
        """What Redis refuses, in its own words, and what to look at; waiting does not help."""
        self.warnings: tuple[str, ...] = ()
        """What is wrong with Redis's configuration, for its operator."""

    async def start(self) -> None:
        self._task = self._loops.keep("redis-check", self._keep)

    async def stop(self) -> None:
        if self._task is not None:
            await self._loops.end(self._task)
        self._check.close()

    def lost(self) -> None:
        """Redis cannot be reached at the moment. What was found before no longer counts."""
        self.usable = False
        self._again.set()

    async def _keep(self) -> None:
        while True:
            self._again.clear()
            self._found(await self._check.run())
            late = not self.usable and not self.refused
            pause_s = timings.REDIS_CHECK_RETRY_S if late else timings.REDIS_CHECK_AGAIN_S
            with suppress(TimeoutError):
                async with asyncio.timeout(jittered(pause_s)):
                    await self._again.wait()

    def _found(self, found: Finding | tuple[str, ...]) -> None:
        self.usable = not isinstance(found, Finding)
        self.refused = str(found) if isinstance(found, Finding) and not found.step.passes else ""
        said = str(found) if isinstance(found, Finding) else ""
        if said != self._said:
            log.warning("Redis cannot be used: %s", said) if said else log.info("Redis: usable")
        self._said = said
        if not isinstance(found, Finding):
            for warning in found:
                if warning not in self.warnings:
                    log.warning("Redis: %s", warning)
            self.warnings = found
