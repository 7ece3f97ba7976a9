"""A worker replica: `execute(request_id, epoch)` — journal in, journal out; health; drain.

The call only says which request; everything else stands in the journal. The work outlives the call: the death
of the caller must not cancel it, only the journal ends it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Any

import msgspec

from serve_app.attempts import Outcome
from serve_app.errors import Fenced, JournalUnavailable, Reason
from serve_app.journal.attempt import Attempt
from serve_app.journal.bodies import has_body
from serve_app.journal.client import connect_redis
from serve_app.journal.connection import RedisLink
from serve_app.journal.entries import (
    TERMINAL_ID,
    AttemptFacts,
    Entry,
    RequestFacts,
    decode_facts,
    decode_line,
    has_ended,
)
from serve_app.journal.store import JournalStore
from serve_app.journal.writer import JournalWriter
from serve_app.logs import about, configure_logging
from serve_app.loops import Loops
from serve_app.membership import STEADY_S, Membership
from serve_app.redis_clock import RedisClock
from serve_app.settings import Settings
from serve_app.snapshots import Snapshots
from serve_app.telemetry import Telemetry
from serve_app.tracing import Facts, Tracing
from workers import recorder as recording
from workers.engine import Engine, EngineFailed
from workers.loop_watch import LoopWatch
from workers.recorder import Recorder
from workers.replay import recorded

log = logging.getLogger("hermes.worker")

_HEALTH_S = 0.5
_DISOWN_FOR_S = 10.0


class WorkerReplica:
    """One engine and the requests it works on."""

    def __init__(self, settings: Settings, replica: str, engine: Engine) -> None:
        configure_logging(settings.telemetry, replica)
        self._settings = settings
        self._replica = replica
        self._engine = engine
        self._telemetry = Telemetry()
        self._loops = Loops(self._telemetry)
        self._tracing = Tracing(settings.telemetry, "hermes-worker", replica)
        self._redis = connect_redis(settings.redis)
        self._link = RedisLink(settings.redis)
        self._clock = RedisClock()
        self._store = JournalStore(settings, self._link, self._clock)
        self._writer = JournalWriter(settings, self._loops)
        self._lease_redis = connect_redis(
            settings.redis, STEADY_S
        )  # of its own: bulk traffic must not hold up the lease
        self._membership = Membership(self._lease_redis, settings.namespace, clock=self._clock, loops=self._loops)
        self._snapshots = Snapshots(
            self._redis, settings.namespace, replica, self._telemetry, settings.telemetry.snapshot_period_s,
            self._loops,
        )  # fmt: skip
        self._loop_watch = LoopWatch(settings.workers.held_s)
        self._work: set[asyncio.Task[Outcome]] = set()
        self._disowning: set[asyncio.Task[None]] = set()
        self._sick: asyncio.Future[None] = asyncio.Future()
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the engine, then take part: only then do dispatchers count this replica's room."""
        began = time.monotonic()
        await self._engine.start()
        await self._writer.start()
        await self._membership.join_as_worker(self._replica, self._settings.workers.max_running_requests)
        await self._snapshots.start()
        if self._settings.telemetry.process_port:
            port = self._telemetry.serve_page(self._settings.telemetry.process_port)
            log.info("metrics of this process on port %d", port)
        self._watch = self._loops.keep("engine-health", self._watch_engine)
        self._loop_watch.start()
        log.info("engine %s ready after %.1f s", self._engine.name, time.monotonic() - began)

    async def stop(self) -> None:
        """Give the lease back and end the engine."""
        if self._watch is not None:
            await self._loops.end(self._watch)
        self._loop_watch.stop()
        for task in self._disowning:
            task.cancel()
        await self._membership.leave()
        await self._snapshots.stop()
        await self._writer.stop()
        await self._engine.stop()
        await self._link.close()
        await self._lease_redis.aclose()
        await self._redis.aclose()
        await self._tracing.stop()

    async def check_health(self) -> None:
        """Raise if the engine cannot serve: Ray Serve then replaces this replica."""
        if self._sick.done():
            raise EngineFailed("the engine has failed")
        self._loops.check_health()
        await self._engine.check_health()

    async def _watch_engine(self) -> None:
        """Give everything up as soon as the engine is sick: Serve's own checks take many seconds to act."""
        while True:
            await asyncio.sleep(_HEALTH_S)
            if not self._sick.done():
                await self._examine()

    async def _examine(self) -> None:
        try:
            await self._engine.check_health()
        except Exception as error:
            if not self._sick.done():
                log.error("the engine is sick, giving up %d requests: %s", len(self._work), error or repr(error))
                self._sick.set_result(None)
                await self._membership.leave()

    async def execute(self, request_id: str, epoch: int, session: str, cause: str = "") -> str:
        """Work on a request until it has ended.

        Args:
            session: for the router alone.
            cause: why the attempt before this one ended.

        Raises:
            EngineFailed: the attempt is lost; the journal holds what was done.
            JournalUnavailable: the attempt could not be opened.
        """
        task = asyncio.create_task(self._work_on(request_id, epoch, cause), name=f"work-{request_id}")
        self._work.add(task)
        self._telemetry.working_on(len(self._work))
        task.add_done_callback(self._done)
        return str(await asyncio.shield(task))

    def _done(self, task: asyncio.Task[Outcome]) -> None:
        self._work.discard(task)
        self._telemetry.working_on(len(self._work))
        if not task.cancelled():
            task.exception()  # retrieved: a caller that died will not

    async def _work_on(self, request_id: str, epoch: int, cause: str) -> Outcome:
        if self._sick.done():
            raise EngineFailed("the engine has failed")
        opened = AttemptFacts(self._replica, self._engine.name, self._clock.now_ms(), cause, self._engine.fingerprint)
        nonce = secrets.token_bytes(8)
        try:
            attempt, entries = await self._writer.open(request_id, epoch, nonce, opened)
        except Fenced as error:
            log.info("request %s not opened: %s", request_id, error, extra=about(request_id))
            return await self._who_fenced(request_id)
        except (TimeoutError, JournalUnavailable) as error:
            disowning = asyncio.create_task(self._disown(request_id, epoch, nonce), name=f"disown-{request_id}")
            self._disowning.add(disowning)
            disowning.add_done_callback(self._disowning.discard)
            raise JournalUnavailable(str(error) or "no answer from Redis") from None
        if has_ended(entries):  # by an attempt that was thought to be lost
            self._writer.abandon(attempt)
            return Outcome.ENDED
        facts = decode_facts(entries[0], RequestFacts)
        recorder = self._recorder(attempt, entries, facts, opened)
        what: Facts = {"hermes.request_id": request_id, "hermes.epoch": epoch, "hermes.engine": self._engine.name}
        with self._tracing.begin("attempt", facts.trace, what) as span:
            try:
                await self._answer(attempt, entries[0], facts, recorder, span.traceparent)
                return Outcome.ENDED
            except Fenced:
                log.info("request %s epoch %d fenced: stopped", request_id, epoch, extra=_about(request_id, facts))
                return await self._who_fenced(request_id)
            except BaseException as error:
                attempt.quit("engine_failed")
                log.warning(
                    "request %s epoch %d given up: %s", request_id, epoch, error or repr(error),
                    extra=_about(request_id, facts, "engine_failed"),
                )  # fmt: skip
                if isinstance(error, EngineFailed):
                    await self._examine()  # or the next attempt may come here, too
                raise
            finally:
                span.tell({"hermes.output_tokens": recorder.output_tokens})

    async def _disown(self, request_id: str, epoch: int, nonce: bytes) -> None:
        """Redis may have taken the opening, and may take it yet."""
        until_s = time.monotonic() + _DISOWN_FOR_S
        while time.monotonic() < until_s:
            try:
                if await self._store.disown(request_id, epoch, nonce):
                    return
            except JournalUnavailable:
                until_s = time.monotonic() + _DISOWN_FOR_S
            await asyncio.sleep(_HEALTH_S)

    def _recorder(self, attempt: Attempt, entries: list[Entry], facts: RequestFacts, opened: AttemptFacts) -> Recorder:
        part = recorded(entries)
        if attempt.epoch > 1:
            attempt.continue_from(part.last, part.body, part.events, part.head)
        recorder = Recorder(attempt, facts, opened, self._telemetry, self._clock, part)
        if not part.whole:
            if part.body:
                recorder.lost = "Redis has lost a part of its journal"
            else:
                recorder.restart()
        elif part.outputs and part.fingerprint != opened.fingerprint:
            if part.seen:
                recorder.lost = f"it was begun by {part.fingerprint}"
            else:
                recorder.restart()
        return recorder

    async def _answer(
        self, attempt: Attempt, request: Entry, facts: RequestFacts, recorder: Recorder, trace: str
    ) -> None:
        """Run the engine until it has answered, the deadline passes, or the journal says stop."""
        if recorder.lost:
            self._lose(recorder)
            await attempt.closed
            return
        if not has_body(request):  # never an empty one for the engine: Redis has lost it
            recorder.end("failed", Reason.JOURNAL_LOST, None)
            await attempt.closed
            return
        recording.current.set(recorder)
        line = decode_line(request)
        if trace:  # the engine's own spans hang below ours
            line = msgspec.structs.replace(line, headers=[*line.headers, ("traceparent", trace)])
        serving = asyncio.create_task(self._engine.serve(attempt.request_id, line, request.body, recorder))
        left_s = facts.deadline_ms / 1000 - self._clock.now_s()
        with self._loop_watch.watched(attempt.request_id) as held:
            awaited: set[asyncio.Future[Any]] = {serving, attempt.closed, self._sick, held}
            await asyncio.wait(awaited, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            self._conclude(serving, recorder)
        elif attempt.closed.done() or not self._sick.done():
            if held.done() and not attempt.closed.done():
                recorder.end("failed", Reason.LOOP_HELD, None)
            elif not attempt.closed.done():
                recorder.end("expired", Reason.DEADLINE, None)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        else:
            recorder.fail()
            serving.add_done_callback(lambda task: task.cancelled() or task.exception())
            serving.cancel()  # not awaited: a sick engine may never answer the abort
            raise EngineFailed("the engine has failed")
        await attempt.closed

    def _lose(self, recorder: Recorder) -> None:
        extra = about(recorder.request_id, recorder.tenant, Reason.ATTEMPT_LOST)
        log.warning("request %s cannot be continued: %s", recorder.request_id, recorder.lost, extra=extra)
        recorder.end("failed", Reason.ATTEMPT_LOST, None)

    def _conclude(self, serving: asyncio.Task[None], recorder: Recorder) -> None:
        error = serving.exception()
        if recorder.broken or isinstance(error, EngineFailed):
            raise EngineFailed(str(error))
        if recorder.lost:
            self._lose(recorder)
            return
        level = self._settings.journal.transcript_compression_level
        if error is not None:
            extra = about(recorder.request_id, recorder.tenant, Reason.ENGINE_ERROR)
            log.error("request %s failed in the engine's server: %r", recorder.request_id, error, extra=extra)
            recorder.end("failed", Reason.ENGINE_ERROR, None)
        elif recorder.head is None or recorder.head.status < 400:
            recorder.end("completed", "", level)
        else:
            kind = Reason.INVALID_REQUEST if recorder.head.status < 500 else Reason.ENGINE_ERROR
            extra = about(recorder.request_id, recorder.tenant, kind)
            log.info("request %s answered %d: %s", recorder.request_id, recorder.head.status, kind, extra=extra)
            recorder.refuse(kind)

    async def _who_fenced(self, request_id: str) -> Outcome:
        """The terminal entry (the request has ended), or another attempt."""
        try:
            last = await self._store.last_id(request_id)
        except JournalUnavailable:
            return Outcome.FENCED
        return Outcome.FENCED if last is not None and last != TERMINAL_ID else Outcome.ENDED


def _about(request_id: str, facts: RequestFacts, reason: str = "") -> dict[str, str]:
    return about(request_id, facts.tenant, reason, facts.trace)
