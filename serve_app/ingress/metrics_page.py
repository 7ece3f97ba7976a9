"""The metrics page of the whole application, assembled at most once per period however many
scrapers ask.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping

from serve_app.admission.limits import AdmissionLimits
from serve_app.clock import SYSTEM
from serve_app.cluster.leases import Membership
from serve_app.errors import RedisUnavailable
from serve_app.observability.metrics_pages import merge_pages, queue_gauges
from serve_app.observability.snapshots import Snapshots
from serve_app.policy.classes import CLASSES
from serve_app.request_queue.depths import QueueDepths
from serve_app.settings import Settings


class MetricsPage:
    """One page, assembled by one task at a time. Each sample is labelled with its replica."""

    def __init__(
        self,
        settings: Settings,
        membership: Membership,
        snapshots: Snapshots,
        depths: QueueDepths,
        limits: AdmissionLimits,
        kept: Callable[[], Awaitable[int]],
    ) -> None:
        self._period_s = settings.telemetry.page_period_s
        self._max_waiting = settings.queue.max_waiting
        self._membership = membership
        self._snapshots = snapshots
        self._depths = depths
        self._limits = limits
        self._kept = kept
        self._page = b""
        self._made_s = -math.inf
        self._making = asyncio.Lock()

    async def read(self) -> bytes:
        """The page, at most one period old plus the time to assemble it."""
        async with self._making:
            if SYSTEM.monotonic_s() - self._made_s >= self._period_s:
                self._page = await self._make()
                self._made_s = SYSTEM.monotonic_s()
            return self._page

    async def _make(self) -> bytes:
        members = self._membership.members
        pages = await self._snapshots.pages(
            [*members.names, *(one.name for one in members.workers)]
        )
        queues, kept = await asyncio.gather(self._queue_state(), self._kept_bytes())
        gauges = queue_gauges(queues, self._redis_bytes(), kept)
        return await asyncio.to_thread(merge_pages, pages, gauges)

    async def _queue_state(self) -> Mapping[str, tuple[int, int, int, float]]:
        try:
            depths, _ = await self._depths.look()
        except RedisUnavailable:
            return {}
        return {
            name: (depth.waiting, depth.claimed, self._max_waiting(name), depth.oldest_s)
            for name in CLASSES
            if (depth := depths.get(name)) is not None
        }

    def _redis_bytes(self) -> tuple[int, int] | None:
        seen = self._limits.memory.seen
        return (seen.used_bytes, seen.limit_bytes) if seen is not None else None

    async def _kept_bytes(self) -> tuple[int, int] | None:
        bound_bytes = self._limits.kept_bound_bytes
        try:
            return await self._kept(), int(bound_bytes) if math.isfinite(bound_bytes) else 0
        except RedisUnavailable:
            return None
