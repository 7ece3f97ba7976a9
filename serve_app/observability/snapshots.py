"""Metrics pages of all processes, in Redis, for the ingress that answers `/metrics`.

`{ns}:metrics:<replica>` holds a zlib-compressed Prometheus page, which expires when its process
stops renewing it.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from serve_app import timings
from serve_app.errors import RedisUnavailable
from serve_app.loops import Loops
from serve_app.observability.metrics import Telemetry
from serve_app.redis.keyspace import metrics_key
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import answered

log = logging.getLogger("hermes.telemetry")


class Snapshots:
    """Writes this process's page, and reads all pages."""

    def __init__(
        self,
        link: RedisLink,
        namespace: str,
        replica: str,
        telemetry: Telemetry,
        period_s: float,
        loops: Loops,
    ) -> None:
        self._link = link
        self._loops = loops
        self._namespace = namespace
        self._replica = replica
        self._telemetry = telemetry
        self._period_s = period_s
        self._one = asyncio.Lock()

    async def start(self) -> None:
        self._loops.keep("metrics-snapshots", self._keep)

    async def _keep(self) -> None:
        expires_s = max(timings.SNAPSHOT_KEPT_S, round(4 * self._period_s))
        while True:
            try:
                page = await self._own()
                await self._leave(await asyncio.to_thread(zlib.compress, page, 1), expires_s)
            except RedisUnavailable as error:
                log.debug("cannot write the metrics snapshot: %s", error)
            except Exception as error:  # a collector failed: the next page may be complete
                log.error("cannot assemble the metrics page: %r", error)
            await asyncio.sleep(self._period_s)

    async def _own(self) -> bytes:
        """This process's page: one at a time, and in a thread, since vLLM's part is long."""
        async with self._one:
            return await asyncio.to_thread(self._telemetry.page)

    async def _leave(self, page: bytes, expires_s: int) -> None:
        key = metrics_key(self._namespace, self._replica)
        (reply,) = await self._link.call([("SET", key, page, "EX", expires_s)])
        answered(reply)

    async def pages(self, replicas: Iterable[str]) -> dict[str, bytes]:
        """Pages by replica. This process's own page is always fresh, and is the only one when Redis
        is unreachable.
        """
        pages = {self._replica: await self._own()}
        others = [name for name in replicas if name != self._replica]
        found: list[Any] = []
        if keys := [metrics_key(self._namespace, name) for name in others]:
            with suppress(RedisUnavailable):
                (reply,) = await self._link.call([("MGET", *keys)], large=True)
                found = answered(reply)
        return pages | await asyncio.to_thread(_unpacked, dict(zip(others, found, strict=False)))


def _unpacked(packed: Mapping[str, bytes | None]) -> dict[str, bytes]:
    """The pages that are there and can be read."""
    pages = {}
    for name, page in packed.items():
        if page:
            try:
                pages[name] = zlib.decompress(page)
            except zlib.error as error:
                log.error("ignoring malformed metrics of %s: %s", name, error)
    return pages
