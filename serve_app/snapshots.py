"""Metrics pages of all processes, left in Redis for whoever answers `/metrics`.

Keys: `{ns}:metrics:<replica>`, a zlib-packed Prometheus page that expires when its process stops renewing it.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Iterable
from typing import Any

from redis.asyncio import Redis

from serve_app.errors import JournalUnavailable
from serve_app.journal.client import reaching
from serve_app.loops import Loops
from serve_app.telemetry import Telemetry

log = logging.getLogger("hermes.telemetry")


class Snapshots:
    """Leaves this process's page, and reads everyone's."""

    def __init__(
        self, redis: Redis, namespace: str, replica: str, telemetry: Telemetry, period_s: float,
        loops: Loops | None = None,
    ) -> None:  # fmt: skip
        self._redis = redis
        self._loops = loops or Loops(telemetry)
        self._prefix = f"{namespace}:metrics:"
        self._replica = replica
        self._telemetry = telemetry
        self._period_s = period_s
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to leave snapshots."""
        self._task = self._loops.keep("metrics-snapshots", self._keep)

    async def stop(self) -> None:
        """Leave no more."""
        if self._task is not None:
            await self._loops.end(self._task)

    async def _keep(self) -> None:
        expires_s = max(5, round(4 * self._period_s))
        while True:
            try:
                page = zlib.compress(self._telemetry.page(), 1)
                await reaching(lambda page=page: self._redis.set(f"{self._prefix}{self._replica}", page, ex=expires_s))  # type: ignore[misc]
            except JournalUnavailable as error:
                log.debug("metrics snapshot not left: %s", error)
            except Exception as error:  # of somebody's collector: the next page may be whole
                log.error("metrics page not made: %r", error)
            await asyncio.sleep(self._period_s)

    async def pages(self, replicas: Iterable[str]) -> dict[str, bytes]:
        """Pages by replica; this process's own is fresh, and the only one where Redis is away."""
        pages = {self._replica: self._telemetry.page()}
        others = [name for name in replicas if name != self._replica]
        try:
            keys = [f"{self._prefix}{name}" for name in others]
            found: list[Any] = await reaching(lambda: self._redis.mget(keys)) if keys else []
        except JournalUnavailable:
            found = []
        for name, page in zip(others, found, strict=False):
            if page:
                try:
                    pages[name] = zlib.decompress(page)
                except zlib.error as error:
                    log.error("metrics of %s left out: nobody can read them: %s", name, error)
        return pages
