"""The parts that every process of the service needs: metrics, logs, traces, and connections to
Redis.
"""

from __future__ import annotations

import gc

from serve_app import timings
from serve_app.clock import RedisClock
from serve_app.loops import Loops
from serve_app.observability.logs import configure_logging
from serve_app.observability.metrics import Activity, Telemetry
from serve_app.observability.metrics_pages import Snapshots
from serve_app.observability.tracing import Tracing
from serve_app.redis.link import RedisLink
from serve_app.requests.store import JournalStore
from serve_app.settings import Settings


class Foundation:
    """Created for one process, and started and stopped with it. `service` is its name in traces."""

    def __init__(self, settings: Settings, service: str, name: str) -> None:
        configure_logging(settings.telemetry, name)
        self.settings = settings
        self.telemetry = Telemetry()
        self.loops = Loops(self.telemetry)
        self.tracing = Tracing(settings.telemetry, service, name)
        self.clock = RedisClock()
        self.link = RedisLink(settings.redis, settings.ingress.max_bulk_reads)
        self.lease_link = RedisLink(settings.redis, within_s=timings.LEASE_STEADY_S)
        """Of its own, so that nothing delays the renewal of the lease."""
        self.store = JournalStore(settings, self.link, self.clock)
        every_s, namespace = settings.telemetry.snapshot_period_s, settings.namespace
        self.snapshots = Snapshots(self.link, namespace, name, self.telemetry, every_s, self.loops)
        self._activity = Activity(self.telemetry.registry, self.loops)

    async def start(self) -> None:
        await self._activity.start()
        await self.snapshots.start()

    async def stop(self) -> None:
        """End the loops that are left, and close the connections, after everything else that uses
        them has stopped.
        """
        await self.loops.stop()
        await self.link.close()
        await self.lease_link.close()
        await self.tracing.stop()


def freeze_heap() -> None:
    """Collect the garbage of the start, and never look again at what is left.

    A full collection looks at every object that the process holds, and the event loop stands still
    meanwhile: some 0.4 s in a worker, which holds 680,000 objects once vLLM is imported. After this
    call it looks only at what has been created since.
    """
    gc.collect()
    gc.freeze()
