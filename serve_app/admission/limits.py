"""The limits on what one ingress admits: how many requests wait, how large they are, and how full
Redis is. They cost no round trip: every ingress counts its own requests against its share of the
limits, so the limits hold in total.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from serve_app import timings
from serve_app.admission.memory_limit import MemoryLimit
from serve_app.contract import Reason
from serve_app.errors import RedisUnavailable, RequestRefused
from serve_app.journal.store import Kept
from serve_app.loops import jittered
from serve_app.request_queue.queue import Depth, QueueDepths
from serve_app.settings import Settings

log = logging.getLogger("hermes.ingress")


@dataclass(slots=True, eq=False)
class Place:
    """What one waiting request uses of the limits."""

    request_class: str
    tenant: str
    body_bytes: int
    sequences: int
    output_bytes: int = 0
    redis_bytes: int = 0


@dataclass(slots=True)
class _Sum:
    sequences: int = 0
    bytes: int = 0


class WaitingLimits:
    """The waiting requests of one ingress. The first one is always admitted, however large it
    is.
    """

    def __init__(self, settings: Settings) -> None:
        self._queue = settings.queue
        self._tenants_differ = settings.auth.required
        self._most_at_once = settings.workers.max_running_requests
        self._ingresses = 1
        self._most_bytes = math.inf
        self.inside: set[Place] = set()
        self._by_class: defaultdict[str, _Sum] = defaultdict(_Sum)
        self._by_tenant: defaultdict[tuple[str, str], _Sum] = defaultdict(_Sum)

    def __len__(self) -> int:
        return len(self.inside)

    def divide(self, ingresses: int, room_bytes: float) -> None:
        """Divide the limits among this many ingresses; no class may use more than half of Redis's
        capacity.
        """
        self._ingresses = max(1, ingresses)
        self._most_bytes = room_bytes / 2

    def enter(self, tenant: str, request_class: str, body_bytes: int, sequences: int = 1) -> Place:
        """Count a request that is about to be admitted; of its sequences no more count than an
        engine runs at a time.

        Raises:
            RequestRefused: `queue_full`, or `tenant_limit` if other tenants may still submit.
        """
        share = self._queue.max_tenant_share
        most_bytes = min(self._queue.max_waiting_bytes(request_class), self._most_bytes)
        bound_bytes = most_bytes / self._ingresses
        of_class = self._by_class[request_class]
        of_tenant = self._by_tenant.get((request_class, tenant), _Sum())
        sequences = min(sequences, self._most_at_once)
        if self._tenants_differ and of_tenant.sequences:
            most = share * self._queue.max_waiting(request_class) / self._ingresses
            more_bytes = of_tenant.bytes + body_bytes
            if of_tenant.sequences + sequences > most or more_bytes > share * bound_bytes:
                raise RequestRefused(
                    Reason.TENANT_LIMIT,
                    f"Your requests of class '{request_class}' that wait already ask for "
                    f"{of_tenant.sequences} answers or texts, with {of_tenant.bytes} bytes; please "
                    "wait for some of them.",
                    retry_after_s=timings.RETRY_AFTER_S,
                )
        if of_class.sequences and of_class.bytes + body_bytes > bound_bytes:
            raise RequestRefused(
                Reason.QUEUE_FULL,
                f"{of_class.bytes} bytes of requests of class '{request_class}' wait already; "
                "please try again later.",
                retry_after_s=timings.RETRY_AFTER_S,
            )
        place = Place(request_class, tenant, body_bytes, sequences)
        self.inside.add(place)
        for one in (of_class, self._by_tenant[request_class, tenant]):
            one.sequences += sequences
            one.bytes += body_bytes
        return place

    def leave(self, place: Place) -> None:
        """A worker has started the request, or it has ended, or nobody knows it any more. A second
        call changes nothing.
        """
        if place not in self.inside:
            return
        self.inside.discard(place)
        of_tenant = self._by_tenant[place.request_class, place.tenant]
        for one in (self._by_class[place.request_class], of_tenant):
            one.sequences -= place.sequences
            one.bytes -= place.body_bytes
        if not of_tenant.sequences:
            del self._by_tenant[place.request_class, place.tenant]


class AdmissionLimits:
    """All limits together, kept up to date by `watch`. Checking them costs no round trip."""

    def __init__(self, settings: Settings) -> None:
        self.memory = MemoryLimit(settings)
        self.waiting = WaitingLimits(settings)
        self._queue = settings.queue
        self._kept_share = settings.journal.max_retained_share
        self._tenants_differ = settings.auth.required
        self._depths: Mapping[str, Depth] = {}

    @property
    def unclaimed(self) -> int:
        """Requests in the queues that no ingress had claimed when they were read last."""
        return sum(depth.waiting for depth in self._depths.values())

    @property
    def kept_bound_bytes(self) -> float:
        """What answers that are kept for later may occupy in all; infinite if Redis has no
        limit.
        """
        return self._kept_share * self.memory.room_bytes

    def check_kept(self, kept: Kept) -> None:
        """Refuse a request whose answer would be kept without a reader, if too many are.

        Raises:
            RequestRefused: `results_full`.
        """
        bound_bytes = self.kept_bound_bytes
        own_bytes = bound_bytes * (self._queue.max_tenant_share if self._tenants_differ else 1)
        if kept.in_all < bound_bytes and kept.of_tenant < own_bytes:
            return
        raise RequestRefused(
            Reason.RESULTS_FULL,
            f"Retained answers occupy {kept.in_all:,} bytes, yours "
            f"{kept.of_tenant:,} of at most {own_bytes:,.0f}; delete some, wait until some expire, "
            "or send the request without Prefer: respond-async, background or store.",
            retry_after_s=timings.FULL_STORAGE_RETRY_AFTER_S,
        )

    def enter(
        self,
        tenant: str,
        request_class: str,
        body_bytes: int,
        output_bytes: int = 0,
        sequences: int = 1,
    ) -> Place:
        """Count a request that is about to be written to Redis, and what its answer may take there,
        until `answered` and `leave`.

        Raises:
            RequestRefused: `queue_full`, `tenant_limit`, `storage_full`.
        """
        depth = self._depths.get(request_class)
        if depth is not None and depth.waiting >= self._queue.max_waiting(request_class):
            raise RequestRefused(
                Reason.QUEUE_FULL,
                f"{depth.waiting} requests of class '{request_class}' wait already; please try "
                "again later.",
                retry_after_s=timings.RETRY_AFTER_S,
            )
        place = self.waiting.enter(tenant, request_class, body_bytes, sequences)
        place.output_bytes = self.memory.most_of_one(output_bytes)
        try:
            place.redis_bytes = self.memory.take(body_bytes, place.output_bytes)
        except RequestRefused:
            self.waiting.leave(place)
            raise
        return place

    def answered(self, place: Place) -> None:
        """Redis has accepted or rejected the request, or its answer is lost."""
        self.memory.answered(place.redis_bytes)

    def leave(self, place: Place) -> None:
        """The request no longer waits. A second call changes nothing."""
        self.waiting.leave(place)

    async def watch(
        self,
        depths: QueueDepths,
        ingresses: Callable[[], tuple[int, int]],
        running: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        """Keep the limits up to date, forever. Requests admitted between two reads are few compared
        with the limits. `ingresses`: how many fill these queues, and how many use this Redis, as
        those of other models do. `running`: what the answers take of the requests that this ingress
        has started.
        """
        while True:
            try:
                self.memory.looking()
                self._depths, memory = await depths.look()
                started = map(self.memory.most_of_one, running())
                of_queues, in_all = ingresses()
                waiting = [place.output_bytes for place in self.waiting.inside]
                self.memory.told(memory, in_all, [*waiting, *started])
                self.waiting.divide(of_queues, self.memory.room_bytes)
            except RedisUnavailable as error:
                log.debug("cannot read the queues' depths: %s", error)
            await asyncio.sleep(jittered(timings.DEPTHS_LOOK_S))
