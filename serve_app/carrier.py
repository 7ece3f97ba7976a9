"""One claimed request to its end: attempt after attempt, whoever dies. The journal decides, never this process.

`carry` reads as the algorithm: run an attempt; where it was lost, choose the next epoch; where another attempt is
running, adopt it. Every decision is taken from the journal, and only by the ingress that holds the claim.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import msgspec

from serve_app.adopted import Adopted
from serve_app.attempts import LOST, NOT_OPENED, Execute, Next, NotOurs, Outcome, WorkerLost
from serve_app.errors import JournalUnavailable, Reason
from serve_app.journal.entries import AttemptFacts, Entry, decode_facts, has_ended
from serve_app.journal.store import JournalStore
from serve_app.logs import Outage, about
from serve_app.loops import jittered
from serve_app.redis_clock import RedisClock
from serve_app.request_queue.dead_letters import DeadLetters
from serve_app.request_queue.entry import QueueEntry
from serve_app.request_queue.queue import RequestQueue
from serve_app.request_queue.suspects import Suspects
from serve_app.routing.fleet import HUNG, Fleet
from serve_app.telemetry import Telemetry
from serve_app.tracing import CLIENT, Facts, Tracing
from serve_app.waits import Waits, WhyItWaits

log = logging.getLogger("hermes.dispatcher")

T = TypeVar("T")

_RETRY_S = 0.2
_RETRY_AT_MOST_S = 2.0
_OPEN_WITHIN_S = 3.0
_CALL_OPENS_WITHIN_S = 5.0
_EXPIRE_AFTER_S = 2.0
_BLAMED = (LOST, HUNG)
"""What counts against a request."""


class Carrier:
    """Carries requests; knows the running calls so that a replica's loss reaches them at once."""

    def __init__(
        self, store: JournalStore, queue: RequestQueue, dead: DeadLetters, suspects: Suspects, fleet: Fleet,
        execute: Execute, telemetry: Telemetry, tracing: Tracing, clock: RedisClock, poison_after: int,
    ) -> None:  # fmt: skip
        self._store = store
        self._queue = queue
        self._dead = dead
        self._suspects = suspects
        self._fleet = fleet
        self._execute = execute
        self._telemetry = telemetry
        self._tracing = tracing
        self._clock = clock
        self._poison_after = poison_after
        self._losses: dict[str, asyncio.Future[str]] = {}
        self._outage = Outage(log, "dispatcher: waiting for Redis")
        self.waits = WhyItWaits()
        self._adopted = Adopted(store, queue)
        fleet.on_loss = self._on_loss

    def _on_loss(self, request_id: str, cause: str) -> None:
        loss = self._losses.get(request_id)
        if loss is not None and not loss.done():
            loss.set_result(cause)

    async def carry(self, entry: QueueEntry) -> None:
        """Stay with a request until it has ended, then acknowledge its queue entry. The first epoch is fixed here."""
        waited_s = self._clock.now_s() - entry.enqueued_ms / 1000
        self._telemetry.claimed(entry.request_class, waited_s)
        waited = {"hermes.request_id": entry.request_id, "hermes.class": entry.request_class}
        with self._tracing.begin("queue", entry.trace, waited, began_ms=int((time.time() - waited_s) * 1000)):
            pass  # it began with the entry, and ends with the claim
        try:
            following = await self._adopt(entry) if entry.taken_over else Next(1)
            while following is not None:
                following = await self._attempt(entry, following)
        except NotOurs:
            log.info("dispatcher: request %s was taken over by another ingress", entry.request_id, extra=_about(entry))
            return
        except (msgspec.DecodeError, LookupError, ValueError) as error:
            await self._give_up(entry, error)
        finally:
            self.waits.over(entry.entry_id)
        await self._until_reached(lambda: self._queue.acknowledge(entry))

    async def _give_up(self, entry: QueueEntry, error: Exception) -> None:
        """A journal that nobody can read: trying again would find the same for ever."""
        log.error("request %s has a journal that cannot be read: %r", entry.request_id, error, extra=_about(entry))
        await self._until_reached(lambda: self._queue.bury(entry))
        if await self._until_reached(lambda: self._store.end(entry.request_id, "failed", Reason.JOURNAL_LOST, [])):
            self._telemetry.ended(entry.request_class, "failed", Reason.JOURNAL_LOST)

    def _waits(self, entry: QueueEntry, what: Waits) -> None:
        self.waits.now(entry.entry_id, entry.request_id, what, time.monotonic())

    async def _attempt(self, entry: QueueEntry, this: Next) -> Next | None:
        """Run one attempt. Returns the next, or None if the request has ended."""
        self._telemetry.attempted(this.epoch)
        async with AsyncExitStack() as stack:
            if this.suspect and not await self._turn(entry, stack):
                await self._end(entry, "expired", Reason.DEADLINE)
                return None
            facts: Facts = {
                "hermes.request_id": entry.request_id,
                "hermes.epoch": this.epoch,
                "hermes.cause": this.cause,
            }
            span = stack.enter_context(self._tracing.begin("dispatch", entry.trace, facts, CLIENT))
            outcome, cause = await self._run(entry, this)
            span.tell({"hermes.outcome": outcome or cause})
        if outcome is Outcome.ENDED:
            return None
        if outcome is Outcome.FENCED:  # a doubled queue entry, or one's own call sent twice
            return await self._adopt(entry)
        if cause == Reason.DEADLINE:
            await self._end(entry, "expired", Reason.DEADLINE)
            return None
        return await self._next(entry, cause, this)

    async def _turn(self, entry: QueueEntry, stack: AsyncExitStack) -> bool:
        """Wait for a suspect's turn, but not beyond the deadline. Whether it has come."""
        self._waits(entry, Waits.TURN)
        return await self._until_reached(
            lambda: stack.enter_async_context(self._suspects.alone(max(0.0, self._left_s(entry))))
        )

    def _left_s(self, entry: QueueEntry) -> float:
        return entry.deadline_ms / 1000 - self._clock.now_s()

    async def _run(self, entry: QueueEntry, this: Next) -> tuple[Outcome | None, str]:
        """The call, or what comes before its answer: the deadline, or the loss of its replica."""
        left_s = self._left_s(entry)
        if left_s <= 0:
            return None, Reason.DEADLINE
        loss: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._losses[entry.request_id] = loss
        call = asyncio.ensure_future(self._execute(entry.request_id, this.epoch, entry.session, this.cause))
        try:
            # The worker keeps the deadline; this is for calls that never reached one.
            awaited: set[asyncio.Future[Any]] = {call, loss}
            self._waits(entry, Waits.OPENING)
            patience_s = min(left_s + _EXPIRE_AFTER_S, _CALL_OPENS_WITHIN_S)
            done, _ = await asyncio.wait(awaited, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if not done and (left_s := self._left_s(entry) + _EXPIRE_AFTER_S) > 0:
                if not await self._is_open(entry, this.epoch):
                    log.warning(
                        "dispatcher: request %s attempt %d was opened by no worker in %.0f s: its call is sent again",
                        entry.request_id, this.epoch, _CALL_OPENS_WITHIN_S, extra=_about(entry, NOT_OPENED),
                    )  # fmt: skip
                    self._fleet.avoid(entry.request_id, time.monotonic())
                    return None, NOT_OPENED
                self._waits(entry, Waits.ENGINE)
                await asyncio.wait(awaited, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if loss.done() and not call.done():  # a replica that died leaves Serve's set, too: then the call fails
                await asyncio.wait({call}, timeout=_RETRY_S)
            if call.done():
                return call.result(), ""
            if not loss.done():
                return None, Reason.DEADLINE
            log.warning(
                "dispatcher: request %s attempt %d moves on: %s", entry.request_id, this.epoch, loss.result(),
                extra=_about(entry, loss.result()),
            )  # fmt: skip
            return None, loss.result()
        except WorkerLost as error:
            log.warning(
                "dispatcher: request %s attempt %d lost: %s", entry.request_id, this.epoch, error,
                extra=_about(entry, LOST),
            )  # fmt: skip
            self._fleet.avoid(entry.request_id, time.monotonic())
            return None, LOST
        finally:
            call.cancel()
            if self._losses.get(entry.request_id) is loss:  # a doubled queue entry has its own
                del self._losses[entry.request_id]
                self._fleet.release(entry.request_id)

    async def _is_open(self, entry: QueueEntry, epoch: int) -> bool:
        """Whether an attempt has been opened, or the request has ended."""
        last = await self._until_reached(lambda: self._store.last_id(entry.request_id))
        return last is None or last.epoch >= epoch

    async def _next(self, entry: QueueEntry, cause: str, tried: Next | None = None) -> Next | None:
        """After an attempt that was lost: the next, or None if the request has ended.

        Raises:
            NotOurs: while this process slept, another took over; its attempts must not be fenced.
        """
        entries = await self._until_reached(lambda: self._store.outline(entry.request_id))
        if not entries or has_ended(entries):
            return None
        (ours,) = await self._until_reached(lambda: self._queue.are_ours([entry]))
        if not ours:
            raise NotOurs
        opened = openings(entries)
        if tried is not None and entries[-1].id.epoch < tried.epoch:  # it never began: nothing is to be counted
            self._waits(entry, Waits.AGAIN)
            await asyncio.sleep(jittered(min(_RETRY_S * 2 ** min(tried.refused, 9), _RETRY_AT_MOST_S)))
            return tried._replace(refused=tried.refused + 1)
        losses = sum(facts.cause in _BLAMED for facts in opened[1:]) + (cause in _BLAMED)
        if losses >= self._poison_after:
            await self._until_reached(lambda: self._keep_dead(entry, entries))
            await self._end(entry, "failed", Reason.POISON)
            return None
        return Next(entries[-1].id.epoch + 1, cause, suspect=losses == self._poison_after - 1 > 0)

    async def _adopt(self, entry: QueueEntry) -> Next | None:
        """Stay with an attempt that somebody else has started. Returns the next, or None if the request has ended.

        Raises:
            NotOurs: another ingress has adopted it.
        """
        began_s = time.monotonic()
        self._waits(entry, Waits.ADOPTED)
        while True:
            entries, ours = await self._until_reached(lambda: self._adopted.look(entry))
            if not ours:
                raise NotOurs
            if not entries or has_ended(entries):
                return None
            if entries[-1].quit:
                return await self._next(entry, LOST)
            if entries[-1].id.epoch == 0:
                if time.monotonic() - began_s > _OPEN_WITHIN_S or entry.taken_over:
                    return Next(1)
            elif fate := self._fleet.fate(openings(entries)[-1].replica):
                return await self._next(entry, fate)
            if self._left_s(entry) < -_EXPIRE_AFTER_S:
                await self._end(entry, "expired", Reason.DEADLINE)
                return None
            await self._adopted.pause()

    async def _keep_dead(self, entry: QueueEntry, entries: Sequence[Entry]) -> None:
        request = await self._store.read_request(entry.request_id)
        if request is None:
            return
        try:
            await self._dead.add(entry.request_id, Reason.POISON, [request, *entries[1:]])
        except JournalUnavailable as error:
            if "OOM" not in str(error):
                raise
            # Its end makes room, and must not wait for room.
            log.error("request %s is given up without a dead letter: %s", entry.request_id, error, extra=_about(entry))

    async def _end(self, entry: QueueEntry, state: str, reason: Reason) -> None:
        async def end() -> None:
            entries = await self._store.outline(entry.request_id)
            if entries and await self._store.end(entry.request_id, state, reason, entries):
                self._telemetry.ended(entry.request_class, state, reason)
                log.info("request %s ended: %s (%s)", entry.request_id, state, reason, extra=_about(entry, reason))

        await self._until_reached(end)

    async def _until_reached(self, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                result = await call()
            except JournalUnavailable as error:
                self._outage.failed(error)
                await asyncio.sleep(jittered(_RETRY_S))
            else:
                self._outage.over()
                return result


def openings(entries: Sequence[Entry]) -> list[AttemptFacts]:
    """Who has opened the attempts of a journal, in order."""
    return [decode_facts(entry, AttemptFacts) for entry in entries if entry.id.epoch > 0 and entry.id.seq == 0]


def _about(entry: QueueEntry, reason: str = "") -> dict[str, str]:
    return about(entry.request_id, entry.tenant, reason, entry.trace)
