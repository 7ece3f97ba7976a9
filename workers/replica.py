"""A worker replica: `execute(request_id, epoch)` for its callers, and health for Ray Serve.

The call only names the request; everything else is in the journal. The work outlives the call: the
death of the caller must not cancel it. Only the journal ends it: a terminal entry or a newer epoch
fences an attempt at its next append.
"""

from __future__ import annotations

import asyncio
import logging
import secrets

import msgspec

from serve_app import timings
from serve_app.clock import RedisClock
from serve_app.cluster.leases import Membership
from serve_app.contract import (
    AttemptResult,
    CallResult,
    Cause,
    CompletionStats,
    EngineReport,
    NotResumed,
    Reason,
    State,
    WorkerAddress,
)
from serve_app.errors import Fenced, RedisUnavailable, RequestRefused
from serve_app.journal.attempt import Attempt
from serve_app.journal.ending import MESSAGES
from serve_app.journal.entries import Entry, decode_facts, decode_line, has_ended
from serve_app.journal.facts import AttemptFacts, RequestFacts
from serve_app.journal.store import JournalStore, written
from serve_app.journal.writer import JournalWriter
from serve_app.loops import Loops, first
from serve_app.observability.logs import about
from serve_app.observability.metrics import Telemetry
from serve_app.observability.tracing import Facts, Tracing
from serve_app.policy.scaling import load
from serve_app.settings import Settings
from workers import recorder as recording
from workers.engine import Engine, EngineFailed, EngineHealth
from workers.loop_watch import LoopWatch
from workers.recorder import Recorder
from workers.replay import AnswerTooLarge, CannotContinue, recorded
from workers.window import Window

log = logging.getLogger("hermes.worker")


class WorkerReplica:
    """One engine and the requests it works on, an attempt at each: open it, let the engine answer
    into the journal, and end the request.

    Args:
        name: under which it holds its lease and opens attempts.
        cluster: the name of its Ray cluster, see `Membership`.
    """

    def __init__(
        self,
        name: str,
        cluster: str,
        settings: Settings,
        engine: Engine,
        loop_watch: LoopWatch,
        writer: JournalWriter,
        store: JournalStore,
        membership: Membership,
        clock: RedisClock,
        telemetry: Telemetry,
        tracing: Tracing,
        loops: Loops,
    ) -> None:
        self._name = name
        self._cluster = cluster
        self._model = settings.model.name
        self._slots = settings.workers.max_running_requests
        """The most sequences that its engine runs at a time."""
        self._window = Window(self._slots)
        self._settings = settings.journal
        self._engine = engine
        self._health = EngineHealth(engine, self._give_up)
        self._loop_watch = loop_watch
        self._writer = writer
        self._store = store
        self._membership = membership
        self._clock = clock
        self._telemetry = telemetry
        self._tracing = tracing
        self._loops = loops
        self._running: set[asyncio.Task[AttemptResult]] = set()
        self._voiding: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None

    async def join(self, address: WorkerAddress | None = None) -> None:
        """Take a lease, so that dispatchers count this replica's capacity, and watch the engine.

        Args:
            address: where it takes calls; None if only Ray calls it.
        """
        await self._membership.join_as_worker(
            self._name, self._capacity, lambda: self._engine.report(self._name), address
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
        ingresses = members.others("", self._cluster, self._model)
        return load(ingresses, members.engines, self._slots)

    async def leave(self) -> None:
        """Delete the lease: dispatchers hand on what this replica works on."""
        if self._watching is not None:
            await self._loops.end(self._watching)
        for task in self._voiding:  # attempts that could not be opened
            task.cancel()
        await self._membership.leave()

    async def _give_up(self, error: Exception) -> None:
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

    async def execute(self, request_id: str, epoch: int, replica: str, cause: str = "") -> str:
        """Work on a request until it has ended. Returns an `AttemptResult`, encoded.

        Args:
            replica: used by the router only; older ingresses send a session.
            cause: why the previous attempt ended.

        Raises:
            EngineFailed: the attempt is lost; the journal holds its progress.
            RedisUnavailable: the attempt could not be opened.
        """
        return (await asyncio.shield(self.begin(request_id, epoch, cause))).encode()

    def begin(self, request_id: str, epoch: int, cause: str) -> asyncio.Task[AttemptResult]:
        """See `execute`. The attempt goes on without its caller."""
        task = asyncio.create_task(self._run(request_id, epoch, cause), name=f"work-{request_id}")
        self._running.add(task)
        self._telemetry.working_on(len(self._running))
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[AttemptResult]) -> None:
        self._running.discard(task)
        self._telemetry.working_on(len(self._running))
        if not task.cancelled():
            task.exception()  # retrieve the exception, because a dead caller will not

    async def _run(self, request_id: str, epoch: int, cause: str) -> AttemptResult:
        """See `execute`."""
        self._health.check()
        opened = AttemptFacts(
            self._name, self._engine.name, self._clock.now_ms(), cause, self._engine.fingerprint
        )
        try:
            attempt, entries = await self._open(request_id, epoch, opened)
        except Fenced as error:
            log.info("request %s not opened: %s", request_id, error, extra=about(request_id))
            return await self._who_fenced(request_id)
        if has_ended(entries):  # by an attempt that was believed lost
            self._writer.abandon(attempt)
            return AttemptResult(CallResult.ENDED)
        facts = decode_facts(entries[0], RequestFacts)
        recorder = self._recorder(attempt, entries, facts, opened)
        what: Facts = {
            "hermes.request_id": request_id,
            "hermes.epoch": epoch,
            "hermes.engine": self._engine.name,
        }
        with self._tracing.begin("attempt", facts.trace, what) as span:
            try:
                await self._answer(attempt, entries[0], facts, recorder, span.traceparent)
                return AttemptResult(CallResult.ENDED, recorder.written, attempt.queued.decode())
            except Fenced as error:
                # Its traceback has this frame, which has the request's body, and `closed` has it.
                error.with_traceback(None)
                extra = _about(request_id, facts)
                log.info("request %s epoch %d fenced: stopped", request_id, epoch, extra=extra)
                return await self._who_fenced(request_id, recorder.written)
            except BaseException as error:
                await self._quit(attempt, facts, error)
                raise
            finally:
                span.tell({"hermes.output_tokens": recorder.output_tokens})

    async def _open(
        self, request_id: str, epoch: int, opened: AttemptFacts
    ) -> tuple[Attempt, list[Entry]]:
        nonce = secrets.token_bytes(8)
        try:
            return await self._writer.open(request_id, epoch, nonce, opened)
        except RedisUnavailable as error:
            voiding = asyncio.create_task(
                self._void(request_id, epoch, nonce), name=f"void-{request_id}"
            )
            self._voiding.add(voiding)
            voiding.add_done_callback(self._voiding.discard)
            raise RedisUnavailable(str(error)) from None  # the only kind that the caller knows

    async def _quit(self, attempt: Attempt, facts: RequestFacts, error: BaseException) -> None:
        attempt.quit(Cause.ENGINE_FAILED)
        log.warning(
            "request %s epoch %d given up: %s",
            attempt.request_id,
            attempt.epoch,
            error or repr(error),
            extra=_about(attempt.request_id, facts, Cause.ENGINE_FAILED),
        )
        if isinstance(error, EngineFailed):
            await self._health.examine()  # or the next attempt may be sent here, too

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

    def _recorder(
        self, attempt: Attempt, entries: list[Entry], facts: RequestFacts, opened: AttemptFacts
    ) -> Recorder:
        part = recorded(entries)
        if attempt.epoch > 1:
            attempt.continue_from(part.last, part.body, part.events, part.head)
        recorder = Recorder(
            attempt,
            facts,
            opened,
            self._telemetry,
            self._clock,
            part,
            self._settings.max_answer_bytes,
        )
        if not part.complete:
            if part.body:
                recorder.lost = CannotContinue(
                    NotResumed.JOURNAL_INCOMPLETE, "Redis has lost a part of its journal"
                )
            else:
                recorder.restart()
        elif part.outputs and part.fingerprint != opened.fingerprint:
            if part.seen:
                recorder.lost = CannotContinue(
                    NotResumed.ENGINE_CONFIG_CHANGED,
                    "it was begun by an engine with another configuration",
                )
            else:
                recorder.restart()
        return recorder

    async def _answer(
        self, attempt: Attempt, request: Entry, facts: RequestFacts, recorder: Recorder, trace: str
    ) -> None:
        """Run the engine until it has answered, the deadline passes, or the journal stops the
        attempt.
        """
        if recorder.lost:
            self._lose(recorder, recorder.lost)
            await attempt.closed
            return
        if not request.has_body:  # Redis has lost the body: never give the engine an empty one
            recorder.end(State.FAILED, Reason.JOURNAL_LOST, None)
            await attempt.closed
            return
        recording.current.set(recorder)
        line = decode_line(request)
        if trace:  # the engine's own spans become children of ours
            line = msgspec.structs.replace(line, headers=[*line.headers, ("traceparent", trace)])
        serving = asyncio.create_task(
            self._engine.serve(attempt.request_id, line, request.body, recorder)
        )
        await self._until_concluded(serving, attempt, facts, recorder)
        await attempt.closed

    async def _until_concluded(
        self,
        serving: asyncio.Task[None],
        attempt: Attempt,
        facts: RequestFacts,
        recorder: Recorder,
    ) -> None:
        """Wait for the first of: the engine's answer, the deadline, a fence, a sick engine."""
        left_s = facts.deadline_ms / 1000 - self._clock.now_s()
        with self._loop_watch.watched(attempt.request_id) as held:
            await first(max(0.0, left_s), serving, attempt.closed, self._health.sick, held)
        if serving.done():
            self._conclude(serving, recorder)
        elif attempt.closed.done() or not self._health.sick.done():
            if held.done() and not attempt.closed.done():
                recorder.end(State.FAILED, Reason.EVENT_LOOP_BLOCKED, None)
            elif not attempt.closed.done():
                recorder.end(State.EXPIRED, Reason.DEADLINE, None)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        else:
            recorder.fail()
            serving.add_done_callback(lambda task: task.cancelled() or task.exception())
            serving.cancel()  # do not wait: a sick engine may never answer the abort
            raise EngineFailed("the engine has failed")

    def _lose(self, recorder: Recorder, lost: CannotContinue | AnswerTooLarge) -> None:
        if isinstance(lost, CannotContinue):
            extra = about(recorder.request_id, recorder.tenant, lost.reason)
            log.warning(
                "request %s cannot be continued: %s", recorder.request_id, lost, extra=extra
            )
        recorder.end(State.FAILED, lost.reason, None)

    def _conclude(self, serving: asyncio.Task[None], recorder: Recorder) -> None:
        error, failure = serving.exception(), recorder.failure
        if recorder.broken or isinstance(error, EngineFailed):
            raise EngineFailed(str(error))
        if recorder.lost:
            self._lose(recorder, recorder.lost)
            return
        if error is None and recorder.answered:
            recorder.end(State.COMPLETED, None, self._settings.transcript_compression_level)
            return
        failure = failure or RequestRefused(Reason.ENGINE_ERROR, MESSAGES[Reason.ENGINE_ERROR])
        log.log(
            logging.INFO if recorder.failure else logging.ERROR,
            "request %s failed: %s: %s",
            recorder.request_id,
            failure.reason,
            failure if error is None else repr(error),
            extra=about(recorder.request_id, recorder.tenant, failure.reason),
        )
        recorder.refuse(failure)

    async def _who_fenced(
        self, request_id: str, ours: CompletionStats | None = None
    ) -> AttemptResult:
        """Whether the terminal entry (the request has ended) or another attempt fenced this one.

        Args:
            ours: what this attempt has written; None if it was not opened.
        """
        try:
            last = await self._store.last(request_id)
        except RedisUnavailable:
            return AttemptResult(CallResult.FENCED)
        if last is None:
            return AttemptResult(CallResult.ENDED, ours)
        if not last.terminal:
            return AttemptResult(CallResult.FENCED)
        told = written(last)
        # Who ends a request from outside does not know what was written, nor of the latest attempt.
        return AttemptResult(
            CallResult.ENDED, told if ours is None or (told and told.begun) else ours
        )


def _about(request_id: str, facts: RequestFacts, reason: str = "") -> dict[str, str]:
    return about(request_id, facts.tenant, reason, facts.trace)
