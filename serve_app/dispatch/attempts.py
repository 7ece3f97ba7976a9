"""Carries one claimed request to its end, attempt after attempt, whichever process dies. The
journal decides, never this process, and only the ingress that holds the claim decides by it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple, TypeVar

from serve_app import timings
from serve_app.cluster.replicas import Replicas
from serve_app.contract import (
    AttemptResult,
    CallResult,
    Cause,
    CompletionStats,
    Execute,
    Reason,
    WorkerLost,
)
from serve_app.errors import RedisUnavailable, Unreadable
from serve_app.foundation import Foundation
from serve_app.journal.entries import REQUEST_ID
from serve_app.loops import backoff, first, jittered
from serve_app.observability.logs import Outage, about
from serve_app.observability.tracing import CLIENT, Facts
from serve_app.policy.work import writes_tokens
from serve_app.redis.connection import Script
from serve_app.redis.keyspace import suspect_key
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import answered
from serve_app.request_queue import QueueEntry, RequestQueue
from serve_app.requests.dead_letters import DeadLetters
from serve_app.requests.endings import Endings
from serve_app.requests.record import Record
from serve_app.requests.store import JournalStore

log = logging.getLogger("hermes.dispatcher")

T = TypeVar("T")

_KEEP = Script(
    "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end"
)
"""For so many milliseconds, if the lock is still this holder's; 0 deletes it."""


BLAMED = (Cause.LOST, Cause.HUNG)
"""Causes that count against a request, because it may be why its worker died or hung."""


class Next(NamedTuple):
    """The attempt to run."""

    epoch: int
    cause: Cause | None = None
    """Why the previous attempt ended."""
    refused: int = 0
    """How often no worker has opened it; the pause before it grows with this number."""
    quarantined: bool = False
    """Whether losing this attempt would make the request poison. Such requests run one at a time.
    """


def after_loss(
    opened: Sequence[str], newest_epoch: int, cause: Cause, tried: Next | None, poison_after: int
) -> Next | None:
    """The next attempt, or None: then the request is poison, after so many losses that count
    against it, and gets no other.

    Args:
        opened: for each attempt that a worker has opened, why the attempt before it ended.
        newest_epoch: of the last of them; 0 if there is none.
        cause: why the last attempt, which was run or watched, has ended.
        tried: the attempt that was run; None if another ingress had started it.
    """
    # it never began, so nothing counts against it
    if tried is not None and newest_epoch < tried.epoch:
        return tried._replace(refused=tried.refused + 1)
    losses = sum(before in BLAMED for before in (*opened[1:], cause))
    if losses >= poison_after:
        return None
    return Next(newest_epoch + 1, cause, quarantined=losses == poison_after - 1 > 0)


class StallReason(StrEnum):
    """What a claimed request waits for. A Redis that does not answer delays all requests, and is
    logged separately.
    """

    OPENING = "opening"
    """Its call is on the way to a worker, which has not opened the attempt yet."""
    ENGINE = "engine"
    """A worker has opened the attempt, and holds its lease."""
    ADOPTED = "adopted"
    """The same, with an attempt that another ingress has started."""
    TURN = "turn"
    """It has killed engines, and such requests run one at a time."""
    AGAIN = "again"
    """An attempt could not even be opened; it pauses before the next one."""
    END = "end"
    """It is ended without an engine, and Redis is told so."""


NORMAL = frozenset({StallReason.ENGINE, StallReason.ADOPTED})
"""Waits that normally last as long as an answer takes."""

WITHOUT_ENGINE = (StallReason.TURN, StallReason.AGAIN, StallReason.END)
"""Waits in which no engine has room for the request, or is about to."""


class Stalled(NamedTuple):
    """A request, and what it waits for since when."""

    entry: QueueEntry
    reason: StallReason
    since_s: float


class StallTracker:
    """What every claimed request waits for, by its queue entry: a request may have two."""

    def __init__(self) -> None:
        self._stalled: dict[tuple[str, str], Stalled] = {}

    def set(self, entry: QueueEntry, reason: StallReason, now_s: float) -> None:
        """The request waits for this from now on; if it already did, the time continues."""
        before = self._stalled.get(entry.key)
        if before is None or before.reason is not reason:
            self._stalled[entry.key] = Stalled(entry, reason, now_s)

    def clear(self, key: tuple[str, str]) -> None:
        """Nobody attends to this queue entry any longer."""
        self._stalled.pop(key, None)

    def keys(self, *reasons: StallReason) -> frozenset[tuple[str, str]]:
        """The queue entries of the requests that wait for one of these."""
        return frozenset(key for key, one in self._stalled.items() if one.reason in reasons)

    def longer_than(self, seconds: float, now_s: float) -> list[Stalled]:
        """Requests that have waited this long for something that should be quicker."""
        return [
            one
            for one in self._stalled.values()
            if one.reason not in NORMAL and now_s - one.since_s > seconds
        ]


class NotOurs(Exception):
    """Another ingress took the claim over while this ingress was paused."""


class Quarantine:
    """Requests that have killed engines run one at a time, so that an innocent request is not
    blamed for another one's crash: a lock over all ingresses, `{ns}:suspect`, whose lease expires
    if its holder dies.
    """

    def __init__(self, link: RedisLink, namespace: str) -> None:
        self._link = link
        self._key = suspect_key(namespace)

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Wait for the turn and hold it while the block runs."""
        holder = secrets.token_hex(16)
        while not await self._taken(holder):
            await asyncio.sleep(timings.QUARANTINE_LOOK_S)

        async def renew() -> None:
            while True:  # if the lease ends, two such requests run at a time, and no more
                await asyncio.sleep(timings.QUARANTINE_LEASE_S / 3)
                await self._keep(holder, int(timings.QUARANTINE_LEASE_S * 1000))

        renewing = asyncio.create_task(renew())
        try:
            yield
        finally:
            renewing.cancel()
            await self._keep(holder, 0)

    async def _taken(self, holder: str) -> bool:
        lease_ms = int(timings.QUARANTINE_LEASE_S * 1000)
        (reply,) = await self._link.call([("SET", self._key, holder, "NX", "PX", lease_ms)])
        return answered(reply) is not None

    async def _keep(self, holder: str, for_ms: int) -> None:
        with suppress(RedisUnavailable):
            await self._link.call([("EVAL", _KEEP, 1, self._key, holder, for_ms)])


@dataclass(eq=False)
class Attempts:
    """Attends to requests until they have ended: runs an attempt; if it is lost, chooses the next
    epoch; if another attempt is running, adopts it.
    """

    _base: Foundation
    _endings: Endings
    _queue: RequestQueue
    _dead: DeadLetters
    _replicas: Replicas
    _execute: Execute

    def __post_init__(self) -> None:
        self._store, self._clock = self._base.store, self._base.clock
        self._quarantine = Quarantine(self._base.link, self._base.settings.namespace)
        self._poison_after = self._base.settings.queue.max_engine_deaths
        self.stalls = StallTracker()
        self._adopted = 0
        """How many requests are watched whose attempts others have started."""
        self._outage = Outage(log, "dispatcher: waiting for Redis")

    async def _until_reached(self, step: Callable[[], Awaitable[T]]) -> T:
        """The result of a step, which is repeated while Redis cannot be reached."""
        while True:
            try:
                result = await step()
            except RedisUnavailable as error:
                self._outage.failed(error)
                await asyncio.sleep(jittered(timings.ATTEMPT_RETRY_S))
            else:
                self._outage.over()
                return result

    async def begun(self, entries: Sequence[QueueEntry]) -> set[tuple[str, str]]:
        """Which of these have an attempt, or have ended, by `QueueEntry.key`; checks many in one
        round trip.
        """
        ids = [entry.request_id for entry in entries]
        records = await self._until_reached(lambda: self._store.records(ids)) if ids else []
        return {
            entry.key
            for entry, record in zip(entries, records, strict=True)
            if record is None or record.last.id != REQUEST_ID
        }

    async def run(self, entry: QueueEntry) -> CompletionStats | None:
        """Attend to a request until it has ended, then acknowledge its queue entry, unless its end
        has done so. Returns what it has written; None if that is not known.
        """
        answer = None
        try:
            answer = await self._until_its_end(entry)
        except NotOurs:
            _log(logging.INFO, entry, "was taken over by another ingress")
            return None
        except Unreadable as error:  # every retry would fail in the same way
            _log(logging.ERROR, entry, f"has a journal that cannot be read: {error!r}")
            await self._until_reached(lambda: self._queue.bury(entry))
            await self._until_reached(lambda: self._endings.end_unreadable(entry))
        finally:
            self.stalls.clear(entry.key)
        if answer is None or answer.acknowledged != entry.entry_id:  # that may be a duplicate
            await self._until_reached(lambda: self._queue.acknowledge(entry))
        if answer is None or answer.written is None:
            return await written_in_journal(self._store, entry)
        return answer.written

    async def _until_its_end(self, entry: QueueEntry) -> AttemptResult | None:
        """Run attempts until the request has ended. Returns the answer of the worker that has seen
        it end; None if there is none.

        A defect of ours ends no request by itself: the journal says how far it is, so it is taken
        up again from there, a few times.

        Raises:
            NotOurs: another ingress has taken it over.
            RedisUnavailable: the entry remains claimed, and is taken up again.
            Unreadable: nobody can decode its journal.
        """
        for pause_s in (*timings.DEFECT_RETRY_S, None):
            try:
                following: Next | AttemptResult | None = Next(1)
                if entry.taken_over:
                    following = await self._adopt(entry)
                while isinstance(following, Next):
                    following = await self._attempt(entry, following)
                return following
            except (NotOurs, RedisUnavailable, Unreadable):
                raise
            except Exception:
                _log(logging.ERROR, entry, "met a defect of ours", Reason.INTERNAL, exc_info=True)
            if pause_s is not None:
                await asyncio.sleep(pause_s)
                entry = replace(entry, taken_over=True)
        await self._end(entry, Reason.INTERNAL)
        return None

    async def _attempt(self, entry: QueueEntry, this: Next) -> Next | AttemptResult | None:
        """Run one attempt. Returns the next; or the worker's answer, if the request has ended, and
        None if it was ended here or has been seen to have ended.
        """
        if this.cause is None:
            self._tell_wait(entry)
        self._base.telemetry.count("hermes_attempts", "first" if this.epoch == 1 else "retry")
        async with AsyncExitStack() as stack:
            if this.quarantined:
                self._stalls_for(entry, StallReason.TURN)
                turn = self._quarantine.alone
                await self._until_reached(lambda: stack.enter_async_context(turn()))
            facts: Facts = {
                "hermes.request_id": entry.request_id,
                "hermes.tenant": entry.tenant,
                "hermes.epoch": this.epoch,
                "hermes.cause": this.cause or "",
            }
            begin = self._base.tracing.begin
            span = stack.enter_context(begin("dispatch", entry.trace, facts, CLIENT))
            answer = await self._call(entry, this)
            result = answer.outcome if isinstance(answer, AttemptResult) else answer
            span.tell({"hermes.outcome": result})
        match answer:
            case AttemptResult(CallResult.ENDED):
                return answer
            case AttemptResult():  # fenced: a duplicate queue entry, or our own call sent twice
                return await self._adopt(entry)
            case cause:
                return await self._next(entry, cause, this)

    def _tell_wait(self, entry: QueueEntry) -> None:
        """How long a request has waited for its first start."""
        waited_s = self._clock.now_s() - entry.accepted_ms / 1000
        self._base.telemetry.observe(
            "hermes_queue_wait_time_seconds", waited_s, entry.request_class
        )
        facts: Facts = {
            "hermes.request_id": entry.request_id,
            "hermes.tenant": entry.tenant,
            "hermes.class": entry.request_class,
        }
        began_ms = int((self._clock.local.unix_s() - waited_s) * 1000)
        with self._base.tracing.begin("queue", entry.trace, facts, began_ms=began_ms):
            pass  # the span began with the queue entry and ends with the start

    async def _call(self, entry: QueueEntry, this: Next) -> AttemptResult | Cause:
        """Call a worker until it has answered or the call is given up. Returns its answer, or why
        there is none.
        """
        loss: asyncio.Future[Cause] = asyncio.get_running_loop().create_future()

        def lose(cause: Cause) -> None:
            if not loss.done():
                loss.set_result(cause)

        try:
            session = entry.session or entry.request_id
            placed = self._replicas.place(session, entry.sequences, lose)
        except LookupError:
            return _lost(entry, this, Cause.NOT_OPENED, "finds no worker")
        call = asyncio.ensure_future(
            self._execute(entry.request_id, this.epoch, placed.replica, this.cause or "")
        )
        try:
            answer = await self._answer(entry, this, call, loss)
        except WorkerLost as error:
            self._replicas.avoid(placed.replica, self._clock.local.monotonic_s())
            return _lost(entry, this, error.cause, f"lost: {error}")
        finally:
            call.cancel()
            self._replicas.release(placed)
        if answer is Cause.NOT_OPENED:
            self._replicas.avoid(placed.replica, self._clock.local.monotonic_s())
        return answer

    async def _answer(
        self,
        entry: QueueEntry,
        this: Next,
        call: asyncio.Future[AttemptResult],
        loss: asyncio.Future[Cause],
    ) -> AttemptResult | Cause:
        self._stalls_for(entry, StallReason.OPENING)
        await first(timings.CALL_OPENS_S, call, loss)
        while not (call.done() or loss.done()):
            record = await self._until_reached(lambda: self._store.record(entry.request_id))
            if record is None or record.ended:
                return AttemptResult(CallResult.FENCED)
            if record.last.id.epoch < this.epoch:
                what = "was opened by no worker in time: its call is sent again"
                return _lost(entry, this, Cause.NOT_OPENED, what)
            self._stalls_for(entry, StallReason.ENGINE)
            await first(timings.CALL_LOOK_S, call, loss)
        if loss.done():  # a dead replica leaves Serve's set too, but then the call fails by itself
            await first(timings.ATTEMPT_RETRY_S, call)
        if call.done():
            return call.result()
        cause = loss.result()
        return _lost(entry, this, cause, f"moves on: {cause}")

    async def _next(
        self, entry: QueueEntry, cause: Cause, tried: Next | None = None
    ) -> Next | None:
        """After a lost attempt: the next one, or None if the request has ended. Raises `NotOurs` if
        another ingress has taken it over, whose attempts must not be fenced.
        """
        if (record := await self._running(entry)) is None:
            return None
        opened = [attempt.cause for attempt in record.openings]
        newest_epoch = record.last.id.epoch
        following = after_loss(opened, newest_epoch, cause, tried, self._poison_after)
        if following is None:
            await self._until_reached(lambda: self._keep_dead(entry, newest_epoch))
            await self._end(entry, Reason.POISON)
            return None
        pause_s = 0.0
        if following.refused:
            pause_s = backoff(timings.ATTEMPT_REFUSED_S, following.refused)
        elif cause is Cause.NOT_OPENED:
            unread = 1 + opened.count(Cause.NOT_OPENED)
            pause_s = backoff(timings.ATTEMPT_UNREAD_S, unread)
        if pause_s:
            self._stalls_for(entry, StallReason.AGAIN)
            await asyncio.sleep(pause_s)
        return following

    async def _adopt(self, entry: QueueEntry) -> Next | None:
        """Watch an attempt that another ingress has started. Returns the next attempt, or None if
        the request has ended. Raises `NotOurs` if another ingress has adopted it.

        The next one also follows an attempt that is silent: Redis may have lost its end, of which
        its worker knows nothing any more. If it works all the same, it is fenced.
        """
        last, began_s = None, self._clock.local.monotonic_s()
        self._stalls_for(entry, StallReason.ADOPTED)
        while (record := await self._running(entry)) is not None:
            if cause := record.last.quit:
                unopened = cause == Cause.NOT_OPENED
                return await self._next(entry, Cause.NOT_OPENED if unopened else Cause.LOST)
            now_s = self._clock.local.monotonic_s()
            if record.last.id.epoch:
                running = record.attempt
                if running and (loss := self._replicas.loss_cause(running.replica)):
                    return await self._next(entry, loss)
                if record.last.id != last:
                    last, began_s = record.last.id, now_s
                elif now_s - began_s > timings.ADOPTED_SILENT_S:
                    return await self._next(entry, Cause.REDIS_UNREACHABLE)
            elif entry.taken_over or now_s - began_s > timings.ATTEMPT_OPENS_S:
                return Next(1)
            self._adopted += 1
            try:  # a dead ingress may leave thousands, and they must not occupy the loop
                many = max(1.0, self._adopted / timings.ADOPTED_MANY)
                await asyncio.sleep(timings.ADOPTED_LOOK_S * many)
            finally:
                self._adopted -= 1
        return None

    async def _running(self, entry: QueueEntry) -> Record | None:
        """What is known of a request; None if it has ended. Raises `NotOurs` if another ingress has
        taken it over.
        """
        # in this order, since a claim goes with the end
        ours = await self._until_reached(lambda: self._queue.is_ours(entry))
        record = await self._until_reached(lambda: self._store.record(entry.request_id))
        if record is None or record.ended:
            return None
        if not ours:
            raise NotOurs
        if record.facts is None:
            raise Unreadable("its journal has lost its beginning")
        return record

    async def _keep_dead(self, entry: QueueEntry, attempts: int) -> None:
        request = await self._store.read_request(entry.request_id)
        if request is None:
            return
        try:
            await self._dead.add(entry.request_id, Reason.POISON, request, attempts)
        except RedisUnavailable as error:
            if "OOM" not in str(error):
                raise
            # Its end frees capacity, so it must not wait for capacity.
            _log(logging.ERROR, entry, f"is given up without a dead letter: {error}")

    async def _end(self, entry: QueueEntry, reason: Reason) -> None:
        self._stalls_for(entry, StallReason.END)
        await self._until_reached(lambda: self._endings.end(entry.request_id, reason))

    def _stalls_for(self, entry: QueueEntry, reason: StallReason) -> None:
        self.stalls.set(entry, reason, self._clock.local.monotonic_s())


def _log(level: int, entry: QueueEntry, what: str, reason: str = "", **more: bool) -> None:
    said = about(entry.request_id, entry.tenant, reason, entry.trace)
    log.log(level, "dispatcher: request %s %s", entry.request_id, what, extra=said, **more)


def _lost(entry: QueueEntry, this: Next, cause: Cause, what: str) -> Cause:
    """The cause for which a call has no answer, once it is logged."""
    _log(logging.WARNING, entry, f"attempt {this.epoch} {what}", cause)
    return cause


async def written_in_journal(store: JournalStore, entry: QueueEntry) -> CompletionStats | None:
    """What a request has written; None if its journal does not say so. For requests of which no
    worker has told. A reading that fails is not repeated.

    The transcript comes along: a few per cent of the bytes of a stream, but megabytes of answers
    that are no tokens, which are therefore not read.
    """
    if not writes_tokens(entry.kind):
        return None
    try:
        record = await store.record(entry.request_id)
        return None if record is None else record.written
    except RedisUnavailable:
        return None
