"""Builds, starts and stops the parts of one worker process."""

from __future__ import annotations

import logging

from serve_app.cluster.direct_calls import CallServer
from serve_app.cluster.leases import Membership
from serve_app.foundation import Foundation
from serve_app.journal.writer import JournalWriter
from serve_app.settings import Settings
from workers.engine import Engine
from workers.loop_watch import LoopWatch
from workers.replica import WorkerReplica
from workers.simulated_engine import SimulatedEngine, SimulatedVllm, arguments_of
from workers.vllm_engine import VllmEngine

log = logging.getLogger("hermes.worker")


def make_engine(settings: Settings) -> Engine:
    if settings.engine.kind == "simulated":
        under_vllm = arguments_of(settings).vllm is not None
        return SimulatedVllm(settings) if under_vllm else SimulatedEngine(settings)
    return VllmEngine(settings)


def most_calls(settings: Settings) -> int:
    """The most calls of a worker at a time. Dispatchers normally send no more than the capacity;
    this limit must not reject what they send.
    """
    return 2 * settings.workers.max_running_requests


class WorkerProcess:
    """One engine, and the replica that uses it. It takes calls at the address `host`; if that is
    empty, only Ray calls it.
    """

    def __init__(
        self, settings: Settings, name: str, cluster: str, engine: Engine, host: str = ""
    ) -> None:
        self._name, self._host = name, host
        self._base = base = Foundation(settings, "hermes-worker", name)
        self._engine = engine
        self._writer = JournalWriter(settings, base.loops)
        engine.progress.on_step = self._writer.pause.stepped
        kept = base.telemetry.of("hermes_journal_buffer_bytes")
        kept.set_function(lambda: self._writer.kept_bytes)
        self._loop_watch = LoopWatch(settings.workers.max_event_loop_block_s, base.telemetry)
        self.replica = WorkerReplica(
            name,
            cluster,
            engine,
            self._loop_watch,
            Membership(base.lease_link, settings.namespace, clock=base.clock, loops=base.loops),
            self._writer,
            base,
        )
        self._calls = CallServer(self.replica.begin, most_calls(settings))
        self._writer.wake = self._calls.wake

    async def start(self) -> None:
        """Load the engine, then join: dispatchers count its capacity only from then on."""
        began_s = self._base.clock.local.monotonic_s()
        await self._engine.start()
        await self._writer.start()
        address = await self._calls.start(self._name, self._host) if self._host else None
        await self.replica.join(address)
        await self._base.start()
        self._loop_watch.start()
        took_s = self._base.clock.local.monotonic_s() - began_s
        log.info("engine %s ready after %.1f s", self._engine.name, took_s)

    async def stop(self) -> None:
        self._loop_watch.stop()
        await self.replica.leave()
        await self._calls.stop()
        await self._writer.stop()
        await self._engine.stop()
        await self._base.stop()
