"""A worker replica: `execute(request_id, epoch)` for its callers, and health for Ray Serve.

The call only names the request; everything else is in the journal. The work outlives the call: the
death of the caller must not cancel it. Only the journal ends it.
"""

from __future__ import annotations

import asyncio
import logging

from serve_app.cluster.leases import Membership
from serve_app.contract import Answer, EngineReport
from serve_app.loops import Loops
from serve_app.observability.metrics import Telemetry
from serve_app.policy.scaling import load
from workers.engine import Engine, EngineHealth
from workers.execution import Execution
from workers.window import Window

log = logging.getLogger("hermes.worker")


class WorkerReplica:
    """One engine and the requests it works on.

    Args:
        name: under which it holds its lease.
        cluster: the name of its Ray cluster, see `Membership`.
        capacity: the most sequences that its engine runs at a time.
    """

    def __init__(
        self,
        name: str,
        cluster: str,
        capacity: int,
        engine: Engine,
        execution: Execution,
        health: EngineHealth,
        membership: Membership,
        telemetry: Telemetry,
        loops: Loops,
    ) -> None:
        self._name = name
        self._cluster = cluster
        self._slots = capacity
        self._window = Window(capacity)
        self._engine = engine
        self._execution = execution
        self._health = health
        self._membership = membership
        self._telemetry = telemetry
        self._loops = loops
        self._running: set[asyncio.Task[Answer]] = set()
        self._watching: asyncio.Task[None] | None = None

    async def join(self) -> None:
        """Take a lease, so that dispatchers count this replica's capacity, and watch the engine."""
        await self._membership.join_as_worker(
            self._name, self._capacity, lambda: self._engine.report(self._name)
        )
        self._watching = self._loops.keep("engine-health", self._health.watch)

    def _capacity(self, report: EngineReport | None) -> int:
        """How many sequences the engine may run, now that it has reported."""
        if report is not None:
            self._window.reported(report)
        self._telemetry.engine_slots(self._window.slots)
        return self._window.slots

    def load(self) -> dict[str, float]:
        """What there is to do in its Ray cluster (`serve_app/policy/scaling.py`); nothing if it
        does not know.
        """
        members = self._membership.members
        if not self._membership.reachable or self._health.sick.done():
            return {}
        return load(members.others("", self._cluster), members.engines, self._slots)

    async def leave(self) -> None:
        """Delete the lease: dispatchers hand on what this replica works on."""
        if self._watching is not None:
            await self._loops.end(self._watching)
        self._execution.stop()
        await self._membership.leave()

    async def give_up(self, error: Exception) -> None:
        """The engine is sick: every attempt ends by itself, and no other is to come."""
        log.error(
            "the engine is sick, giving up %d requests: %s",
            len(self._running),
            error or repr(error),
        )
        await self._membership.leave()

    async def check_health(self) -> None:
        """Raise if the engine cannot serve; Ray Serve then replaces this replica."""
        self._health.check()
        self._loops.check_health()
        await self._engine.check_health()

    async def execute(self, request_id: str, epoch: int, session: str, cause: str = "") -> str:
        """Work on a request until it has ended. Returns an `Answer`, encoded.

        Args:
            session: used by the router only.
            cause: why the previous attempt ended.

        Raises:
            EngineFailed: the attempt is lost; the journal holds its progress.
            RedisUnavailable: the attempt could not be opened.
        """
        task = asyncio.create_task(
            self._execution.run(request_id, epoch, cause), name=f"work-{request_id}"
        )
        self._running.add(task)
        self._telemetry.working_on(len(self._running))
        task.add_done_callback(self._done)
        return (await asyncio.shield(task)).encode()

    def _done(self, task: asyncio.Task[Answer]) -> None:
        self._running.discard(task)
        self._telemetry.working_on(len(self._running))
        if not task.cancelled():
            task.exception()  # retrieve the exception, because a dead caller will not
