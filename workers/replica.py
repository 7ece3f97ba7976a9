"""A worker replica: `execute(request_id, epoch)` for its callers, and health for Ray Serve.

The call only names the request; everything else is in the journal. The work outlives the call: the
death of the caller must not cancel it. Only the journal ends it: a terminal entry or a newer epoch
fences an attempt at its next append.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets

import msgspec

from serve_app import timings
from serve_app.cluster.leases import Membership
from serve_app.contract import (
    AttemptResult,
    CallResult,
    Cause,
    CompletionStats,
    EngineReport,
    IngressLease,
    Reason,
    WorkerAddress,
)
from serve_app.errors import Fenced, RedisUnavailable
from serve_app.foundation import Foundation
from serve_app.journal.attempt_log import AttemptLog
from serve_app.journal.entries import AttemptFacts, Entry, RequestFacts, decode_facts, decode_line
from serve_app.loops import retrieved
from serve_app.observability.logs import about
from serve_app.observability.tracing import Facts
from serve_app.policy.order import KV_FULL, spare_slots
from serve_app.policy.scaling import load
from workers.attempt import Attempt, EngineFailed, current
from workers.engine import Engine, EngineHealth
from workers.journal_writer import JournalWriter
from workers.loop_watch import LoopWatch
from workers.replay import recorded

log = logging.getLogger("hermes.worker")

_ROOM = 0.5
"""What waits while less of the cache is used waits for its prefill, which fewer slots would not
hasten.
"""
_IN_USE = 0.9
"""The part of the window that counts as all of it."""
_MORE = 1 / 32
_KEPT = 3 / 4
_WAITING = 2
"""So many sequences wait between two steps of an engine that is not short of anything."""
_CALM_READINGS = 20
"""For so many readings after it was cut the window stays: what was started before still runs."""


class Window:
    """How many sequences an engine may run at a time, of `most` (`max_num_seqs`).

    vLLM takes what it is given: what does not fit into its KV cache waits in it, where tenants and
    classes count no more, or is preempted and computed again. So the window follows what the engine
    says of itself twice a second: it grows by a thirty-second while all of it is used and the cache
    is not, and shrinks by a quarter, from what runs, after a preemption or while sequences wait in
    it at two readings, at most once in ten seconds. Beside it there are spare slots
    (`serve_app/policy/order.py`).
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._spare = spare_slots(most)
        self._preemptions = 0
        self._waited = False
        self._calm = 0
        self.size = most - self._spare

    @property
    def slots(self) -> int:
        return self.size + self._spare

    def reported(self, engine: EngineReport) -> None:
        """Twice a second: what the engine says."""
        if not engine.kv_tokens:  # an encoder keeps no KV
            return
        preempted = engine.preemptions > self._preemptions
        used = engine.used_tokens / engine.kv_tokens
        # With all slots in use, they wait for a slot: a request of several sequences brings more.
        short_of_memory = used > _ROOM and engine.running < self._most
        waited, self._waited = self._waited, short_of_memory and engine.waiting > _WAITING
        self._preemptions = engine.preemptions
        self._calm -= 1
        if preempted or (waited and self._waited):
            if self._calm <= 0:
                self.size = max(1, math.floor(_KEPT * min(self.size, engine.running)))
                self._calm = _CALM_READINGS
        elif self._calm <= 0 and used < KV_FULL and engine.running >= _IN_USE * self.size:
            more = math.ceil(_MORE * self.size)
            self.size = min(self._most - self._spare, self.size + more)


class WorkerReplica:
    """One engine and the requests it works on, an attempt at each: open it, let the engine answer
    into the journal, and end the request. It holds its lease and opens attempts under `name`.
    """

    def __init__(
        self,
        name: str,
        cluster: str,
        engine: Engine,
        loop_watch: LoopWatch,
        membership: Membership,
        writer: JournalWriter,
        base: Foundation,
    ) -> None:
        self._name = name
        self._any = IngressLease("", cluster, model=base.settings.model.name)
        """Stands for the ingresses that may call it."""
        self._slots = base.settings.workers.max_running_requests
        """The most sequences that its engine runs at a time."""
        self._window = Window(self._slots)
        self._engine = engine
        self._health = EngineHealth(engine, self._give_up)
        self._loop_watch = loop_watch
        self._membership = membership
        self._writer = writer
        self._store, self._clock, self._loops = base.store, base.clock, base.loops
        self._telemetry, self._tracing = base.telemetry, base.tracing
        self._running: set[asyncio.Task[AttemptResult]] = set()
        self._voiding: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None

    async def join(self, address: WorkerAddress | None = None) -> None:
        """Take a lease, with the address that takes calls, if not only Ray calls it; dispatchers
        then count this replica's capacity. And watch the engine.
        """
        await self._membership.join_as_worker(self._name, self._capacity, self._report, address)
        self._watching = self._loops.keep("engine-health", self._health.watch)

    def _report(self) -> EngineReport | None:
        report = self._engine.report(self._name)
        return report and report._replace(model=self._any.model)

    def _capacity(self, report: EngineReport | None) -> int:
        """How many sequences the engine may run, now that it has reported."""
        if report is not None:
            self._window.reported(report)
        self._telemetry.set("hermes_engine_slots", self._window.slots)
        return self._window.slots

    def load(self) -> dict[str, float]:
        """What there is to do in its Ray cluster (`serve_app/policy/scaling.py`); nothing if it
        does not know.
        """
        members = self._membership.members.of(self._any.model)
        if not self._membership.reachable or self._health.sick.done():
            return {}
        return load(members.others(self._any), members.engines, self._slots)

    async def leave(self) -> None:
        """Delete the lease: dispatchers hand on what this replica works on."""
        if self._watching is not None:
            await self._loops.end(self._watching)
        for task in self._voiding:  # attempts that could not be opened
            task.cancel()
        await self._membership.leave()

    async def _give_up(self, error: Exception) -> None:
        """The engine is sick: every attempt ends by itself, and no other is to come."""
        why = error or repr(error)
        log.error("the engine is sick, giving up %d requests: %s", len(self._running), why)
        await self._membership.leave()

    async def check_health(self) -> None:
        """Raise if the engine cannot serve; Ray Serve then replaces this replica."""
        self._health.check()
        self._loops.check_health()
        await self._engine.check_health()

    async def execute(self, request_id: str, epoch: int, replica: str, cause: str = "") -> str:
        """Work on a request until it has ended. Returns an `AttemptResult`, encoded. `replica` is
        for the router, `cause` why the previous attempt ended.

        Raises:
            EngineFailed: the attempt is lost; the journal holds its progress.
            RedisUnavailable: the attempt could not be opened.
        """
        return (await asyncio.shield(self.begin(request_id, epoch, cause))).encode()

    def begin(self, request_id: str, epoch: int, cause: str) -> asyncio.Task[AttemptResult]:
        """See `execute`. The attempt goes on without its caller."""
        task = asyncio.create_task(self._run(request_id, epoch, cause), name=f"work-{request_id}")
        self._running.add(task)
        self._telemetry.set("hermes_in_flight_requests", len(self._running))
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[AttemptResult]) -> None:
        self._running.discard(task)
        self._telemetry.set("hermes_in_flight_requests", len(self._running))
        retrieved(task)  # a dead caller will not

    async def _run(self, request_id: str, epoch: int, cause: str) -> AttemptResult:
        self._health.check()
        opened = AttemptFacts(
            self._name, self._engine.name, self._clock.now_ms(), cause, self._engine.fingerprint
        )
        try:
            journal, entries = await self._open(request_id, epoch, opened)
        except Fenced as error:
            log.info("request %s not opened: %s", request_id, error, extra=about(request_id))
            return await self._resolve_fence(request_id)
        facts = decode_facts(entries[0], RequestFacts)
        part = recorded(entries) if epoch > 1 else None
        attempt = Attempt(journal, facts, opened, self._telemetry, self._clock, part)
        what: Facts = {
            "hermes.request_id": request_id,
            "hermes.tenant": facts.tenant,
            "hermes.epoch": epoch,
            "hermes.engine": self._engine.name,
        }
        with self._tracing.begin("attempt", facts.trace, what) as span:
            try:
                await self._work(attempt, entries[0], span.traceparent)
                return AttemptResult(CallResult.ENDED, attempt.written, journal.queued.decode())
            except Fenced as error:
                # Its traceback has this frame, which has the request's body, and `closed` has it.
                error.with_traceback(None)
                extra = about(request_id, facts.tenant, "", facts.trace)
                log.info("request %s epoch %d fenced: stopped", request_id, epoch, extra=extra)
                return await self._resolve_fence(request_id, attempt.written)
            except BaseException as error:
                attempt.stop(Cause.ENGINE_FAILED)
                extra = about(request_id, facts.tenant, Cause.ENGINE_FAILED, facts.trace)
                why = error or repr(error)
                log.warning("request %s epoch %d given up: %s", request_id, epoch, why, extra=extra)
                if isinstance(error, EngineFailed):
                    await self._health.examine()  # or the next attempt may be sent here, too
                raise
            finally:
                span.tell({"hermes.output_tokens": attempt.output_tokens})

    async def _work(self, attempt: Attempt, request: Entry, trace: str) -> None:
        """Run the engine, unless the request cannot be answered."""
        attempt.check_recorded()
        if b"b" not in request.fields:  # lost: never give the engine an empty one
            attempt.stop(Reason.JOURNAL_LOST)
        if not attempt.open:
            await attempt.journal.closed
            return
        current.set(attempt)
        line = decode_line(request)
        attempt.path = line.path
        if trace:  # the engine's own spans become children of ours
            line = msgspec.structs.replace(line, headers=[*line.headers, ("traceparent", trace)])
        work = self._engine.serve(attempt.request_id, line, request.body, attempt)
        serving = asyncio.create_task(work)
        with self._loop_watch.watched(attempt.request_id) as blocked:
            await attempt.run(serving, self._health.sick, blocked)

    async def _open(
        self, request_id: str, epoch: int, opened: AttemptFacts
    ) -> tuple[AttemptLog, list[Entry]]:
        nonce = secrets.token_bytes(8)
        try:
            return await self._writer.open(request_id, epoch, nonce, opened)
        except RedisUnavailable as error:
            voiding = asyncio.create_task(self._void(request_id, epoch, nonce))
            self._voiding.add(voiding)
            voiding.add_done_callback(self._voiding.discard)
            raise RedisUnavailable(str(error)) from None  # the only kind that the caller knows

    async def _void(self, request_id: str, epoch: int, nonce: bytes) -> None:
        """Void an opening that Redis may have accepted, or may still accept."""
        until_s = self._clock.local.monotonic_s() + timings.VOID_FOR_S
        while self._clock.local.monotonic_s() < until_s:
            try:
                if await self._store.void(request_id, epoch, nonce):
                    return
            except RedisUnavailable:
                until_s = self._clock.local.monotonic_s() + timings.VOID_FOR_S
            await asyncio.sleep(timings.HEALTH_LOOK_S)

    async def _resolve_fence(
        self, request_id: str, ours: CompletionStats | None = None
    ) -> AttemptResult:
        """Whether the terminal entry (the request has ended) or another attempt fenced this one,
        which has written `ours`; None if it was not opened.
        """
        try:
            record = await self._store.record(request_id)
        except RedisUnavailable:
            return AttemptResult(CallResult.FENCED)
        if record is not None and not record.ended:
            return AttemptResult(CallResult.FENCED)
        told = record.written if record is not None else None
        # Who ends a request from outside does not know what was written, nor of the latest attempt.
        known = told if ours is None or (told and told.begun) else ours
        return AttemptResult(CallResult.ENDED, known)
