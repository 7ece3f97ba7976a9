"""Carries one claimed request to its end, attempt after attempt, whichever process dies. The
journal decides, never this process.

`run` reads as the algorithm: run an attempt; if it is lost, choose the next epoch; if another
attempt is running, adopt it. Every decision is based on the journal, and only the ingress that
holds the claim decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack

import msgspec

from serve_app import timings
from serve_app.clock import RedisClock
from serve_app.cluster.replicas import Replicas
from serve_app.contract import Answer, Cause, Execute, Outcome, Reason, State, Written
from serve_app.dispatch.adopted import Adopted
from serve_app.dispatch.calls import Calls, UntilReached, about_entry
from serve_app.dispatch.quarantine import Quarantine
from serve_app.dispatch.waits import Waits, WhyItWaits
from serve_app.endings import Endings
from serve_app.errors import RedisUnavailable
from serve_app.journal.entries import Entry, decode_facts, has_ended
from serve_app.journal.facts import AttemptFacts
from serve_app.journal.outline import written
from serve_app.journal.store import JournalStore
from serve_app.loops import backoff
from serve_app.observability.metrics import Telemetry
from serve_app.observability.tracing import CLIENT, Facts, Tracing
from serve_app.policy.retries import Next, after_loss
from serve_app.policy.work import writes_tokens
from serve_app.request_queue.dead_letters import DeadLetters
from serve_app.request_queue.entry import QueueEntry
from serve_app.request_queue.queue import RequestQueue

log = logging.getLogger("hermes.dispatcher")


class NotOurs(Exception):
    """Another ingress took the claim over while this ingress was paused."""


class Attempts:
    """Attends to requests until they have ended."""

    def __init__(
        self,
        store: JournalStore,
        endings: Endings,
        queue: RequestQueue,
        dead: DeadLetters,
        quarantine: Quarantine,
        replicas: Replicas,
        execute: Execute,
        telemetry: Telemetry,
        tracing: Tracing,
        clock: RedisClock,
        poison_after: int,
    ) -> None:
        self._store = store
        self._endings = endings
        self._queue = queue
        self._dead = dead
        self._quarantine = quarantine
        self._replicas = replicas
        self._telemetry = telemetry
        self._tracing = tracing
        self._clock = clock
        self._poison_after = poison_after
        self._until_reached = UntilReached()
        self.waits = WhyItWaits()
        self._adopted = Adopted(store, queue)
        self._calls = Calls(execute, store, replicas, self.waits, self._until_reached, clock)

    async def begun(self, entries: Sequence[QueueEntry]) -> set[tuple[str, str]]:
        """See `Adopted.begun`."""
        return await self._until_reached(lambda: self._adopted.begun(entries))

    async def run(self, entry: QueueEntry) -> Written | None:
        """Attend to a request until it has ended, then acknowledge its queue entry. This call fixes
        the first epoch.

        Returns:
            What the request has written; None if that is not known.
        """
        try:
            following: Next | Written | None = Next(1)
            if entry.taken_over:
                following = await self._adopt(entry)
            while isinstance(following, Next):
                following = await self._attempt(entry, following)
            written = following
        except NotOurs:
            log.info(
                "dispatcher: request %s was taken over by another ingress",
                entry.request_id,
                extra=about_entry(entry),
            )
            return None
        except (msgspec.DecodeError, LookupError, ValueError) as error:
            await self._give_up(entry, error)
            written = None
        finally:
            self.waits.over(entry.key)
        await self._until_reached(lambda: self._queue.acknowledge(entry))
        return await written_in_journal(self._store, entry) if written is None else written

    def _tell_wait(self, entry: QueueEntry) -> None:
        """How long a request has waited for its first start."""
        waited_s = self._clock.now_s() - entry.enqueued_ms / 1000
        self._telemetry.claimed(entry.request_class, waited_s)
        waited = {"hermes.request_id": entry.request_id, "hermes.class": entry.request_class}
        with self._tracing.begin(
            "queue",
            entry.trace,
            waited,
            began_ms=int((self._clock.local.unix_s() - waited_s) * 1000),
        ):
            pass  # the span began with the queue entry and ends with the start

    async def _give_up(self, entry: QueueEntry, error: Exception) -> None:
        """End a request whose journal cannot be decoded, because every retry would fail in the same
        way.
        """
        log.error(
            "request %s has a journal that cannot be read: %r",
            entry.request_id,
            error,
            extra=about_entry(entry),
        )
        await self._until_reached(lambda: self._queue.bury(entry))
        await self._until_reached(
            lambda: self._endings.end_unreadable(entry, State.FAILED, Reason.JOURNAL_LOST)
        )

    async def _attempt(self, entry: QueueEntry, this: Next) -> Next | Written | None:
        """Run one attempt. Returns the next; or what the request has written, if it has ended, and
        None if the worker does not know.
        """
        if this.cause is None:
            self._tell_wait(entry)
        self._telemetry.attempted(this.epoch)
        async with AsyncExitStack() as stack:
            if this.quarantined and not await self._turn(entry, stack):
                await self._end(entry, State.EXPIRED, Reason.DEADLINE)
                return None
            facts: Facts = {
                "hermes.request_id": entry.request_id,
                "hermes.epoch": this.epoch,
                "hermes.cause": this.cause or "",
            }
            span = stack.enter_context(self._tracing.begin("dispatch", entry.trace, facts, CLIENT))
            answer = await self._calls.run(entry, this)
            span.tell({"hermes.outcome": answer.outcome if isinstance(answer, Answer) else answer})
        match answer:
            case Answer(Outcome.ENDED, written):
                return written
            case Answer():  # fenced: a duplicate queue entry, or our own call sent twice
                return await self._adopt(entry)
            case Cause.DEADLINE:
                await self._end(entry, State.EXPIRED, Reason.DEADLINE)
                return None
            case cause:
                return await self._next(entry, cause, this)

    async def _turn(self, entry: QueueEntry, stack: AsyncExitStack) -> bool:
        """Wait for the request's turn, but not beyond its deadline. Returns whether the turn has
        come.
        """
        self._calls.waits_for(entry, Waits.TURN)
        return await self._until_reached(
            lambda: stack.enter_async_context(
                self._quarantine.alone(max(0.0, self._calls.left_s(entry)))
            )
        )

    async def _next(
        self, entry: QueueEntry, cause: Cause, tried: Next | None = None
    ) -> Next | None:
        """After a lost attempt: the next one, or None if the request has ended.

        Raises:
            NotOurs: another ingress took over while this process was paused; its attempts must not
                be fenced.
        """
        entries = await self._until_reached(lambda: self._store.outline(entry.request_id))
        if not entries or has_ended(entries):
            return None
        (ours,) = await self._until_reached(lambda: self._queue.are_ours([entry]))
        if not ours:
            raise NotOurs
        opened = [facts.cause for facts in openings(entries)]
        newest_epoch = entries[-1].id.epoch
        following = after_loss(opened, newest_epoch, cause, tried, self._poison_after)
        if following is None:
            await self._until_reached(lambda: self._keep_dead(entry, entries))
            await self._end(entry, State.FAILED, Reason.POISON)
        elif following.refused:
            self._calls.waits_for(entry, Waits.AGAIN)
            await asyncio.sleep(backoff(timings.ATTEMPT_REFUSED_S, following.refused))
        return following

    async def _adopt(self, entry: QueueEntry) -> Next | None:
        """Watch an attempt that another ingress has started. Returns the next attempt, or None if
        the request has ended.

        Raises:
            NotOurs: another ingress has adopted the request.
        """
        began_s = self._clock.local.monotonic_s()
        self._calls.waits_for(entry, Waits.ADOPTED)
        while True:
            entries, ours = await self._until_reached(lambda: self._adopted.look(entry))
            if not entries or has_ended(entries):
                return None
            if not ours:
                raise NotOurs
            if entries[-1].quit:
                return await self._next(entry, Cause.LOST)
            if entries[-1].id.epoch == 0:
                if (
                    self._clock.local.monotonic_s() - began_s > timings.ATTEMPT_OPENS_S
                    or entry.taken_over
                ):
                    return Next(1)
            elif fate := self._replicas.fate(openings(entries)[-1].replica):
                return await self._next(entry, fate)
            if self._calls.left_s(entry) < -timings.EXPIRE_GRACE_S:
                await self._end(entry, State.EXPIRED, Reason.DEADLINE)
                return None
            await self._adopted.pause()

    async def _keep_dead(self, entry: QueueEntry, entries: Sequence[Entry]) -> None:
        request = await self._store.read_request(entry.request_id)
        if request is None:
            return
        try:
            await self._dead.add(entry.request_id, Reason.POISON, [request, *entries[1:]])
        except RedisUnavailable as error:
            if "OOM" not in str(error):
                raise
            # Its end frees capacity, so it must not wait for capacity.
            log.error(
                "request %s is given up without a dead letter: %s",
                entry.request_id,
                error,
                extra=about_entry(entry),
            )

    async def _end(self, entry: QueueEntry, state: State, reason: Reason) -> None:
        self._calls.waits_for(entry, Waits.END)
        await self._until_reached(lambda: self._endings.end(entry.request_id, state, reason))


def openings(entries: Sequence[Entry]) -> list[AttemptFacts]:
    """The openings of a journal's attempts, in order."""
    return [decode_facts(entry, AttemptFacts) for entry in entries if entry.id.opens]


async def written_in_journal(store: JournalStore, entry: QueueEntry) -> Written | None:
    """What a request has written; None if its journal does not say so. For requests of which no
    worker has told. A reading that fails is not repeated.

    The transcript comes along: a few per cent of the bytes of a stream, but megabytes of answers
    that are no tokens, which are therefore not read.
    """
    if not writes_tokens(entry.kind):
        return None
    try:
        last = await store.last(entry.request_id)
        return None if last is None else written(last)
    except (RedisUnavailable, LookupError, ValueError):  # the latter two: nobody can decode it
        return None
