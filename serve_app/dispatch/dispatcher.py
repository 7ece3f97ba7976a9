"""Claims, orders and runs requests. Every ingress has one dispatcher, which also takes over the
claims of dead ingresses.

`Scheduler` alone decides which request starts when; the dispatcher claims what it asks for and
starts what it names.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from serve_app import timings
from serve_app.clock import RedisClock
from serve_app.cluster.members import Members
from serve_app.cluster.replicas import Replicas
from serve_app.contract import CompletionStats, IngressLease
from serve_app.dispatch.attempts import WITHOUT_ENGINE, Attempts, StallReason
from serve_app.errors import RedisUnavailable
from serve_app.loops import Loops, ended, jittered
from serve_app.observability.ingress_metrics import OrderTelemetry
from serve_app.observability.logs import Outage, about
from serve_app.policy.order import (
    DEFAULT_RULES,
    Claim,
    Rules,
    Running,
    Scheduler,
    allowance,
    as_general_use,
    general_slots,
    peers_saturated,
)
from serve_app.policy.overload import Asked, Expected, Load, Overload, Reading
from serve_app.policy.prediction import Estimated
from serve_app.policy.work import output_bytes
from serve_app.request_queue import QueueDepths, QueueEntry, RequestQueue

log = logging.getLogger("hermes.dispatcher")


@dataclass(eq=False)
class Dispatcher:
    """Claims requests while the engines have capacity, and attends to each until it has ended."""

    _queue: RequestQueue
    _depths: QueueDepths
    _attempts: Attempts
    _replicas: Replicas
    _me: IngressLease
    """Its name, Ray cluster and model."""
    _clock: RedisClock
    _loops: Loops
    _telemetry: OrderTelemetry
    _rules: Rules = DEFAULT_RULES
    overload: Overload = field(default_factory=Overload)
    """Is told what starts and what waits."""
    unclaimed: Callable[[], Mapping[str, int]] = dict
    """How many requests of each class nobody has claimed."""

    def __post_init__(self) -> None:
        self._scheduler: Scheduler[QueueEntry] = Scheduler(self._rules)
        self._members = Members()
        self._superseded = False
        self._stopping = False
        self._attending: set[asyncio.Task[CompletionStats | None]] = set()
        self._claim_waits = False
        """Whether a claim waits for an arrival."""
        self._changed = asyncio.Event()
        """Set when the capacity or its use has changed."""
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def in_flight(self) -> int:
        """Requests that this dispatcher has claimed and that have not ended."""
        return len(self._scheduler.running) + len(self._scheduler)

    @property
    def _must_wait(self) -> bool:
        return self._scheduler.full or len(self._scheduler) > 0

    def expected(self, asked: Asked) -> Expected:
        """See `Scheduler.expected`."""
        return self._scheduler.expected(asked)

    def outputs_bytes(self) -> list[int]:
        """See `output_bytes`, for each request that this dispatcher has started."""
        entries = [one.entry for one in self._scheduler.running]
        return [output_bytes(one.kind, one.max_output_tokens, one.sequences) for one in entries]

    def output_tokens(self, request: Estimated) -> float:
        """What each sequence of a request will probably write."""
        return self._scheduler.lengths.predict(request).mean

    def lease(self, complete: bool, unclaimed: int = 0) -> IngressLease:
        """What other ingresses need to know to divide the engines' capacity: requests that use no
        engine take no room from them.

        Args:
            unclaimed: requests in the queue that nobody has claimed. What this ingress can claim is
                on its way to an engine, and what a newer Ray cluster claims is not for this one.
        """
        idle = self._attempts.stalls.keys(*WITHOUT_ENGINE)
        using = [one for one in self._scheduler.running if one.entry.key not in idle]
        return self._me._replace(
            complete=complete,
            running=sum(one.sequences for one in using),
            waiting=self._scheduler.waiting_sequences,
            running_general=sum(one.sequences for one in using if one.general),
            unclaimed=unclaimed if self._must_wait and not self._superseded else 0,
            load=self.overload.load(self._clock.now_ms()).encode(),
        )

    async def start(self) -> None:
        self._tasks = [
            self._loops.keep("dispatcher", self._run),
            self._loops.keep("take-over", self._take_over),
            self._loops.keep("watchdog", self._tell_who_waits),
        ]

    async def stop(self) -> None:
        """Claim and start nothing more; another ingress takes over what has been claimed."""
        self._stopping = True
        await self._loops.end(*self._tasks)
        await ended(self._attending)

    def on_members(self, members: Members) -> None:
        """Divide the capacity of this Ray cluster's engines among its living ingresses.

        Once a newer cluster that serves the same model is complete, it gets all requests that are
        not yet claimed. If this cluster started more, they would be cut off when it ends, and
        requests to a new version would be answered by the old one.
        """
        self._members = members
        self._replicas.unban_expired(self._clock.local.monotonic_s())
        self._replicas.leased(members.living if members.trusted else None)
        workers = self._replicas.mine(members.workers)
        capacity = sum(one.capacity for one in workers)
        newer = members.newer(self._me)
        superseded = newer != ""
        if superseded != self._superseded:
            taken = f"a newer Ray cluster, {newer}, takes all new requests"
            log.info("dispatcher: %s", taken if superseded else "claiming again")
        self._superseded = superseded
        others = members.others(self._me)
        order, waiting = self._scheduler, len(self._scheduler) > 0
        quarantined = self._attempts.stalls.keys(StallReason.TURN)
        order.give_back(one for one in order.running if one.entry.key in quarantined)
        order.capacity = allowance(capacity, others, waiting)
        self._replicas.placement.slots = {
            one.name: math.ceil(one.capacity * order.capacity / capacity)
            for one in workers
            if one.capacity
        }
        for_all = sum(general_slots(one.capacity, self._rules.engine_slots) for one in workers)
        order.general_capacity = allowance(for_all, map(as_general_use, others), waiting)
        order.ahead = peers_saturated(capacity, others, order.capacity)
        order.claiming = not superseded
        order.shared = self.overload.shared
        now_ms, waiting_here = self._clock.now_ms(), order.waiting()
        loads = tuple(Load.decode(one.load) for one in others)
        reading = Reading(
            capacity, order.capacity, frozenset(waiting_here), loads, self.unclaimed()
        )
        self.overload.told(reading, now_ms)
        self._telemetry.waiting(waiting_here, now_ms)
        self._telemetry.order(order)
        self._telemetry.overload(self.overload)
        self._changed.set()
        self._fill_meanwhile()

    def on_end(self, request_id: str) -> None:
        """A request has ended from outside: if it is claimed and has not started, it never takes a
        slot. Its queue entry has gone with it.
        """
        if self._scheduler.drop(lambda entry: entry.request_id == request_id):
            self._changed.set()

    async def _run(self) -> None:
        outage = Outage(log, "dispatcher: cannot claim")
        while True:
            if (wanted := self._scheduler.wanted()) is not None:
                await self._claim(wanted, outage)
            self._fill()
            if self._scheduler.wanted() is None:
                self._changed.clear()
                await self._changed.wait()

    def _fill(self) -> None:
        if self._stopping:
            return
        now_ms = self._clock.now_ms()
        while (running := self._scheduler.next(now_ms)) is not None:
            self._start(running)

    def _fill_meanwhile(self) -> None:
        """Start what may start while the loop waits for arrivals. Otherwise it claims first, so
        that the most urgent request may be among those that have just come.
        """
        if self._claim_waits:
            self._fill()

    async def _claim(self, wanted: Claim, outage: Outage) -> None:
        self._claim_waits = wanted.wait
        try:
            claimed = await self._queue.claim(wanted.of_each, wanted.classes, wanted.wait)
        except RedisUnavailable as error:
            outage.failed(error)
            await asyncio.sleep(jittered(timings.CLAIM_RETRY_S))
            return
        finally:
            self._claim_waits = False
        outage.over()
        self._telemetry.claimed(len(claimed))
        for entry in claimed:
            self._scheduler.add(entry)

    async def _take_over(self) -> None:
        """Run claims that nobody works on: those of dead ingresses, and those of this ingress whose
        answer was lost.
        """
        outage = Outage(log, "dispatcher: cannot take over")
        while True:
            await asyncio.sleep(jittered(timings.TAKE_OVER_S))
            try:
                taken = await self._abandoned()
            except RedisUnavailable as error:
                outage.failed(error)
                continue
            outage.over()
            if taken:
                log.info("dispatcher: took over %d requests that no ingress worked on", len(taken))
                await self._resume(taken)

    async def _abandoned(self) -> list[QueueEntry]:
        """Claim what nobody works on, unless there is no claim to look at.

        Claims of dead ingresses are taken over only if an ingress without a lease is certainly
        dead; after an outage of Redis, no ingress has a lease. Claims of this ingress need no such
        certainty, because it knows which of them it has received.
        """
        if not self._depths.may_be_claimed:
            return []
        certain = self._members.trusted and not self._superseded
        return await self._queue.take_over(
            self._members.living if certain else None, self._claimed()
        )

    async def _resume(self, taken: Sequence[QueueEntry]) -> None:
        """Attend to requests at once whose attempts may run already; the others wait their turn."""
        begun = await self._attempts.begun(taken)
        for entry in taken:
            if entry.key not in begun:
                self._scheduler.add(entry)
        for running in self._scheduler.adopt(entry for entry in taken if entry.key in begun):
            self._start(running)
        self._changed.set()

    def _claimed(self) -> list[QueueEntry]:
        """The queue entries that this ingress works on, started or not."""
        return [*(running.entry for running in self._scheduler.running), *self._scheduler]

    async def _tell_who_waits(self) -> None:
        while True:
            await asyncio.sleep(timings.WAITING_TELL_S)
            waiting = self._attempts.stalls.longer_than(
                timings.WAITING_TELL_S, now_s := self._clock.local.monotonic_s()
            )
            for entry, what, since_s in waiting[: timings.WAITING_TELL_AT_MOST]:
                log.warning(
                    "dispatcher: request %s has waited for %.0f s: %s",
                    entry.request_id,
                    now_s - since_s,
                    what,
                    extra=about(entry.request_id, entry.tenant, what, entry.trace),
                )
            if len(waiting) > timings.WAITING_TELL_AT_MOST:
                log.warning("dispatcher: and %d more", len(waiting) - timings.WAITING_TELL_AT_MOST)

    def _start(self, running: Running[QueueEntry]) -> None:
        entry = running.entry
        self._telemetry.started(running)
        self.overload.started(entry.request_class, entry.tenant, running.cost)
        if running.sequences < entry.sequences:  # its engine may run fewer than it asks for
            entry = replace(entry, sequences=running.sequences)
        task = asyncio.create_task(self._attempts.run(entry), name=f"attempts-{entry.request_id}")
        self._attending.add(task)
        task.add_done_callback(partial(self._on_done, running))

    def _on_done(
        self, running: Running[QueueEntry], task: asyncio.Task[CompletionStats | None]
    ) -> None:
        self._attending.discard(task)
        error = None if task.cancelled() else task.exception()
        written = None if task.cancelled() or error is not None else task.result()
        settled = self._scheduler.ended(running, written, self._clock.now_ms())
        if settled is not None:
            order = self._scheduler
            self._telemetry.ended(settled, order.lengths.useful, order.classes.promotions)
        if error is not None:
            # The entry remains claimed, and is taken up again from the queue.
            entry = running.entry
            extra = about(entry.request_id, entry.tenant, trace=entry.trace)
            log.error("dispatcher: %s failed: %r", task.get_name(), error, extra=extra)
        self._changed.set()
        if not task.cancelled():
            self._fill_meanwhile()
