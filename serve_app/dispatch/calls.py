"""The running calls to workers: one per attempt, until it is answered or given up. A worker
enforces its request's deadline itself; this module enforces it for calls that never reached a
worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from serve_app import timings
from serve_app.clock import RedisClock
from serve_app.cluster.replicas import Replicas
from serve_app.contract import Answer, Cause, Execute, WorkerLost
from serve_app.dispatch.waits import Waits, WhyItWaits
from serve_app.errors import RedisUnavailable
from serve_app.journal.store import JournalStore
from serve_app.loops import jittered
from serve_app.observability.logs import Outage, about
from serve_app.policy.retries import Next
from serve_app.request_queue.entry import QueueEntry

log = logging.getLogger("hermes.dispatcher")


class Calls:
    """Knows the running calls, so that the loss of a replica ends each of its calls at once."""

    def __init__(
        self,
        execute: Execute,
        store: JournalStore,
        replicas: Replicas,
        waits: WhyItWaits,
        until_reached: UntilReached,
        clock: RedisClock,
    ) -> None:
        self._execute = execute
        self._store = store
        self._replicas = replicas
        self._waits = waits
        self._until_reached = until_reached
        self._clock = clock
        self._losses: dict[str, asyncio.Future[Cause]] = {}
        replicas.listen(self._on_loss)

    def _on_loss(self, request_id: str, cause: Cause) -> None:
        loss = self._losses.get(request_id)
        if loss is not None and not loss.done():
            loss.set_result(cause)

    async def run(self, entry: QueueEntry, this: Next) -> Answer | Cause:
        """Call a worker. Returns its answer, or why there is none."""
        if self.left_s(entry) <= 0:
            return Cause.DEADLINE
        loss: asyncio.Future[Cause] = asyncio.get_running_loop().create_future()
        self._losses[entry.request_id] = loss
        call = asyncio.ensure_future(
            self._execute(entry.request_id, this.epoch, entry.session, this.cause or "")
        )
        try:
            return await self._answer(entry, this, call, loss)
        except WorkerLost as error:
            return self._lost(entry, this, error)
        finally:
            call.cancel()
            # a duplicate queue entry has its own call
            if self._losses.get(entry.request_id) is loss:
                del self._losses[entry.request_id]
                self._replicas.release(entry.request_id)

    async def _answer(
        self,
        entry: QueueEntry,
        this: Next,
        call: asyncio.Future[Answer],
        loss: asyncio.Future[Cause],
    ) -> Answer | Cause:
        self.waits_for(entry, Waits.OPENING)
        grace_s = timings.EXPIRE_GRACE_S
        await _first(min(self.left_s(entry) + grace_s, timings.CALL_OPENS_S), call, loss)
        if not (call.done() or loss.done()) and (left_s := self.left_s(entry) + grace_s) > 0:
            if not await self._is_open(entry, this.epoch):
                return self._not_opened(entry, this)
            self.waits_for(entry, Waits.ENGINE)
            await _first(left_s, call, loss)
        if loss.done():  # a dead replica leaves Serve's set too, but then the call fails by itself
            await _first(timings.ATTEMPT_RETRY_S, call)
        if call.done():
            return call.result()
        return self._moves_on(entry, this, loss.result()) if loss.done() else Cause.DEADLINE

    async def _is_open(self, entry: QueueEntry, epoch: int) -> bool:
        """Whether an attempt has been opened, or the request has ended."""
        last = await self._until_reached(lambda: self._store.last(entry.request_id))
        return last is None or last.id.epoch >= epoch

    def _not_opened(self, entry: QueueEntry, this: Next) -> Cause:
        log.warning(
            "dispatcher: request %s attempt %d was opened by no worker in %.0f s: its call is sent "
            "again",
            entry.request_id,
            this.epoch,
            timings.CALL_OPENS_S,
            extra=about_entry(entry, Cause.NOT_OPENED),
        )
        self._replicas.avoid(entry.request_id, self._clock.local.monotonic_s())
        return Cause.NOT_OPENED

    def _moves_on(self, entry: QueueEntry, this: Next, cause: Cause) -> Cause:
        log.warning(
            "dispatcher: request %s attempt %d moves on: %s",
            entry.request_id,
            this.epoch,
            cause,
            extra=about_entry(entry, cause),
        )
        return cause

    def _lost(self, entry: QueueEntry, this: Next, error: WorkerLost) -> Cause:
        log.warning(
            "dispatcher: request %s attempt %d lost: %s",
            entry.request_id,
            this.epoch,
            error,
            extra=about_entry(entry, Cause.LOST),
        )
        self._replicas.avoid(entry.request_id, self._clock.local.monotonic_s())
        return Cause.LOST

    def waits_for(self, entry: QueueEntry, what: Waits) -> None:
        """From now on the request waits for this."""
        self._waits.now(entry.key, entry.request_id, what, self._clock.local.monotonic_s())

    def left_s(self, entry: QueueEntry) -> float:
        """Seconds until the request's deadline; negative if it has passed."""
        return entry.deadline_ms / 1000 - self._clock.now_s()


async def _first(within_s: float, *futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done, with a time limit."""
    await asyncio.wait(futures, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)


def about_entry(entry: QueueEntry, reason: str = "") -> dict[str, str]:
    """What a log line says about the request, besides its text."""
    return about(entry.request_id, entry.tenant, reason, entry.trace)


T = TypeVar("T")


class UntilReached:
    """Repeats a step while Redis cannot be reached. An outage is logged once for all steps."""

    def __init__(self) -> None:
        self._outage = Outage(log, "dispatcher: waiting for Redis")

    async def __call__(self, step: Callable[[], Awaitable[T]]) -> T:
        """Returns the step's result eventually; raises every error other than
        `RedisUnavailable`.
        """
        while True:
            try:
                result = await step()
            except RedisUnavailable as error:
                self._outage.failed(error)
                await asyncio.sleep(jittered(timings.ATTEMPT_RETRY_S))
            else:
                self._outage.over()
                return result
