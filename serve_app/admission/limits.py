"""The limits on what one ingress admits: how many requests wait, how large they are, how full Redis
is, and what a tenant may take. They cost no round trip: every ingress counts its own requests
against its share of the limits, so the limits hold in total. Those of a tenant are counted by the
script that accepts (`TenantLimits`).

A full Redis rejects every append, including those that would free memory, so requests are refused
earlier: large ones at `redis.max_memory_share`, small ones halfway between that and the end. A
client that sends large requests therefore does not block everybody else. What accepted requests
will write is reserved: the answers that the engines can write at a time with all their tokens, the
others as they are once they have ended.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from serve_app import timings
from serve_app.contract import COUNTING, Reason
from serve_app.errors import RedisUnavailable, RequestRefused
from serve_app.journal.entries import RequestFacts
from serve_app.loops import jittered
from serve_app.policy.overload import Asked, Expected, Overload
from serve_app.policy.tenant_limits import (
    BY_THE_MINUTE,
    NO_LIMITS,
    Limits,
    Over,
    Reserved,
    Standing,
    check_size,
    month_of,
)
from serve_app.redis.configuration import warnings_of_size
from serve_app.redis.replies import Memory
from serve_app.request_queue import Depth, QueueDepths
from serve_app.requests.store import Kept
from serve_app.settings import Settings

log = logging.getLogger("hermes.ingress")

_SMALL_BYTES = 16 * 1024
_ENTRIES_BYTES = 4_000
"""Memory for a waiting request besides its body, and for the first entry of its answer."""
_PACKED = 30
"""An answer that has ended takes this part of what it took while it was written."""
_ALLOCATED = 1.25
"""Factor on a body: the most that Redis's allocator uses for it."""


class MemoryLimit:
    """Redis's memory as this ingress knows it: the last reading, and what it has admitted since."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ingresses = 1
        self._taken_bytes = 0
        """Bytes that were ever admitted."""
        self._on_their_way_bytes = 0
        self._seen_bytes = 0
        self._reserved_bytes = 0
        self._places = 0
        """Answers that the engines could write besides those that are reserved with all tokens."""
        self.workers = 0
        """How many run here."""
        self.seen: Memory | None = None
        """The last reading; None before the first one, and if Redis does not report its memory."""
        self.warnings: tuple[str, ...] = ()
        """What is wrong with `maxmemory`, for Redis's operator."""

    @property
    def room_bytes(self) -> float:
        """What requests may use of Redis's memory in total; infinite if Redis has no limit."""
        limit_bytes = self.seen.limit_bytes if self.seen is not None else 0
        return self._settings.redis.max_memory_share * limit_bytes if limit_bytes else math.inf

    def looking(self) -> None:
        """Redis is about to be asked. Its answer will include everything that it has acknowledged
        so far.
        """
        self._seen_bytes = self._taken_bytes - self._on_their_way_bytes

    def told(
        self, memory: Memory | None, ingresses: int, outputs_bytes: Sequence[int] = ()
    ) -> None:
        """Redis has answered (None: it does not tell its memory, so there is no limit). The
        capacity is divided among `ingresses`. `outputs_bytes`: what the answers take that this
        ingress waits for, or has started.
        """
        self.seen = memory
        self._ingresses = max(1, ingresses)
        slots = self.workers * self._settings.workers.max_running_requests
        places = math.ceil(slots / self._ingresses)
        written = sum(heapq.nlargest(places, outputs_bytes))
        self._reserved_bytes = written + (sum(outputs_bytes) - written) // _PACKED
        self._places = places - len(outputs_bytes)
        most_bytes = self._settings.ingress.max_body_bytes
        warnings = warnings_of_size(memory, self.room_bytes, most_bytes) if memory else []
        for warning in warnings:
            if warning not in self.warnings:
                log.warning("Redis: %s", warning)
        self.warnings = tuple(warnings)

    def most_of_one(self, output_bytes: int) -> int:
        """What is reserved for an answer: no more than it may have, nor than a few can have."""
        return int(min(output_bytes, self._settings.journal.max_answer_bytes, self.room_bytes / 4))

    def take(self, body_bytes: int, output_bytes: int = 0) -> int:
        """Count a request that is about to be admitted, or refuse it (`storage_full`). Pass the
        result to `answered`. `output_bytes`: see `most_of_one`.
        """
        cost_bytes = int(body_bytes * _ALLOCATED) + _ENTRIES_BYTES
        memory, share = self.seen, self._settings.redis.max_memory_share
        reserved_bytes = output_bytes if self._places > 0 else output_bytes // _PACKED
        reserved_bytes += self._reserved_bytes
        if memory is not None and memory.limit_bytes:
            if body_bytes <= _SMALL_BYTES:
                share = (1 + share) / 2
            room_bytes = (share * memory.limit_bytes - memory.used_bytes) / self._ingresses
            # Redis briefly holds a body twice: as received, and as stored.
            unseen_bytes = self._taken_bytes - self._seen_bytes + self._on_their_way_bytes
            if unseen_bytes + cost_bytes > room_bytes - reserved_bytes:
                raise RequestRefused(
                    Reason.STORAGE_FULL,
                    "The service's storage is nearly full; please try again later, or send a "
                    "shorter request, or ask for a shorter answer (max_tokens).",
                    retry_after_s=timings.FULL_STORAGE_RETRY_AFTER_S,
                )
        self._reserved_bytes = reserved_bytes
        self._places -= 1
        self._taken_bytes += cost_bytes
        self._on_their_way_bytes += cost_bytes
        return cost_bytes

    def answered(self, cost_bytes: int) -> None:
        self._on_their_way_bytes -= cost_bytes


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """What one waiting request uses of the limits."""

    request_class: str
    tenant: str
    body_bytes: int
    sequences: int
    output_bytes: int = 0
    redis_bytes: int = 0
    cost: float = 0.0


@dataclass(slots=True)
class _Sum:
    sequences: int = 0
    bytes: int = 0


class AdmissionLimits:
    """All limits together, kept up to date by `watch`. The first waiting request of a class is
    always admitted, however large it is.
    """

    def __init__(
        self,
        settings: Settings,
        overload: Overload | None = None,
        expected: Callable[[Asked], Expected] = lambda _: Expected(0.0, 0.0),
    ) -> None:
        self.memory = MemoryLimit(settings)
        self._overload = overload or Overload()
        self._expected = expected
        self.waiting: set[WaitingRequest] = set()
        self.ingresses = 1
        """How many share the limits on waiting requests."""
        self._queue = settings.queue
        self._kept_share = settings.journal.max_retained_share
        self._tenants_differ = settings.auth.required
        self._most_at_once = settings.workers.max_running_requests
        self.depths: Mapping[str, Depth] = {}
        """Of the queue of each class, when it was read last."""
        self._by_class: defaultdict[str, _Sum] = defaultdict(_Sum)
        self._by_tenant: defaultdict[tuple[str, str], _Sum] = defaultdict(_Sum)

    @property
    def unclaimed(self) -> dict[str, int]:
        """Requests in the queue of each class that no ingress had claimed when it was read last."""
        return {name: depth.waiting for name, depth in self.depths.items()}

    @property
    def kept_bound_bytes(self) -> float:
        """What answers that are kept for later may occupy in all; infinite if Redis has no
        limit.
        """
        return self._kept_share * self.memory.room_bytes

    def check_kept(self, kept: Kept) -> None:
        """Refuse a request whose answer would be kept without a reader, if too many are: with
        `results_full`.
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

    def enter(self, asked: Asked, body_bytes: int, output_bytes: int = 0) -> WaitingRequest:
        """Count a request that is about to be written to Redis, and what its answer may take there,
        until `answered` and `leave`.

        Raises:
            RequestRefused: `queue_full`, `overloaded`, `tenant_limit`, `storage_full`.
        """
        name = asked.request_class
        expected, depth = self._expected(asked), self.depths.get(name)
        if depth is not None:
            taken = depth.waiting + self._overload.coming(asked)
            if taken >= self._queue.max_waiting(name):
                what = f"{depth.waiting} requests of class '{name}' wait already"
                raise self._overload.refusal(Reason.QUEUE_FULL, what, asked, expected.cost)
        self._overload.check(asked, expected)
        request = self.wait(asked, body_bytes, expected.cost)
        request.output_bytes = self.memory.most_of_one(output_bytes)
        try:
            request.redis_bytes = self.memory.take(body_bytes, request.output_bytes)
        except RequestRefused:
            self.leave(request)
            raise
        self._overload.promises.kept(asked)
        return request

    def wait(self, asked: Asked, body_bytes: int, cost: float = 0.0) -> WaitingRequest:
        """Count a request among those that wait; of its sequences no more count than an engine runs
        at a time. No class may use more than half of Redis's capacity.

        Raises:
            RequestRefused: `queue_full`, or `tenant_limit` if other tenants may still submit.
        """
        name, tenant = asked.request_class, asked.tenant
        share = self._queue.max_tenant_share
        most_bytes = min(self._queue.max_waiting_bytes(name), self.memory.room_bytes / 2)
        bound_bytes = most_bytes / self.ingresses
        of_class = self._by_class[name]
        of_tenant = self._by_tenant.get((name, tenant), _Sum())
        sequences = min(asked.sequences, self._most_at_once)
        if self._tenants_differ and of_tenant.sequences:
            most = share * self._queue.max_waiting(name) / self.ingresses
            more_bytes = of_tenant.bytes + body_bytes
            if of_tenant.sequences + sequences > most or more_bytes > share * bound_bytes:
                what = f"Your requests of class '{name}' that wait already ask for "
                what += f"{of_tenant.sequences} answers or texts, with {of_tenant.bytes} bytes"
                instead = "wait for some of them"
                raise self._overload.refusal(
                    Reason.TENANT_LIMIT, what, asked, cost, instead=instead
                )
        if of_class.sequences and of_class.bytes + body_bytes > bound_bytes:
            held = f"{of_class.bytes} bytes of requests of class '{name}' wait already"
            raise self._overload.refusal(Reason.QUEUE_FULL, held, asked, cost)
        request = WaitingRequest(name, tenant, body_bytes, sequences, cost=cost)
        self.waiting.add(request)
        self._overload.enters(name, tenant, cost)
        for one in (of_class, self._by_tenant[name, tenant]):
            one.sequences += sequences
            one.bytes += body_bytes
        return request

    def answered(self, request: WaitingRequest) -> None:
        """Redis has accepted or rejected the request, or its answer is lost."""
        self.memory.answered(request.redis_bytes)

    def leave(self, request: WaitingRequest) -> None:
        """A worker has started the request, or it has ended, or nobody knows it any more. A second
        call changes nothing.
        """
        if request not in self.waiting:
            return
        self.waiting.discard(request)
        self._overload.enters(request.request_class, request.tenant, -request.cost)
        of_tenant = self._by_tenant[request.request_class, request.tenant]
        for one in (self._by_class[request.request_class], of_tenant):
            one.sequences -= request.sequences
            one.bytes -= request.body_bytes
        if not of_tenant.sequences:
            del self._by_tenant[request.request_class, request.tenant]

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
                self.depths, memory = await depths.look()
                started = map(self.memory.most_of_one, running())
                of_queues, in_all = ingresses()
                waiting = [request.output_bytes for request in self.waiting]
                self.memory.told(memory, in_all, [*waiting, *started])
                self.ingresses = max(1, of_queues)
            except RedisUnavailable as error:
                log.debug("cannot read the queues' depths: %s", error)
            await asyncio.sleep(jittered(timings.DEPTHS_LOOK_S))


@dataclass(eq=False)
class TenantLimits:
    """The limits of tenants, as one ingress knows them between two requests.

    The script that accepts a request counts, and refuses (`requests/lifecycle.lua`). What it has
    refused is kept away from Redis until the limit is reset: what has no place in this minute is
    refused here, and for what another request's end may permit, Redis is asked without the body.

    Args:
        output_tokens: what each sequence of a request will probably write, no more than it may.
    """

    output_tokens: Callable[[Asked], float]
    _refused: dict[str, tuple[int, Standing]] = field(default_factory=dict, init=False)
    """The last refusals, by tenant, and when that limit is reset."""

    def reserve(self, facts: RequestFacts, asked: Asked, limits: Limits, path: str) -> RequestFacts:
        """The facts with what the request takes of its tenant's limits; what only counts tokens
        takes none.

        Raises:
            RequestRefused: `rate_limit_exceeded` if it alone is too large.
        """
        if limits == NO_LIMITS:
            return msgspec.structs.replace(facts, reserved=None)
        written = int(asked.sequences * self.output_tokens(asked))
        tokens = 0 if path in COUNTING else asked.prompt_tokens + written
        month = month_of(facts.admitted_ms)
        reserved = Reserved(tokens, tokens if facts.detached else 0, month)
        check_size(limits, reserved)
        return msgspec.structs.replace(facts, reserved=reserved)

    def asks_first(self, facts: RequestFacts, limits: Limits, path: str) -> bool:
        """Whether the script shall be asked before it gets the body.

        Raises:
            RequestRefused: no request is accepted now, and this one can join none.
        """
        until_ms, standing = self._refused.get(facts.tenant, (0, None))
        if standing is None or facts.reserved is None or standing.limits != limits:
            return False
        if facts.admitted_ms >= until_ms:
            del self._refused[facts.tenant]
            return False
        over = standing.refuses(facts.reserved)
        if over in BY_THE_MINUTE and not facts.twins:  # within it nothing is given back
            raise _refusal(standing._replace(over=over), facts, path)
        return over is not Over.NONE

    def check(self, facts: RequestFacts, standing: Standing | None, path: str) -> None:
        """Remember and raise the script's refusal."""
        if standing is None or standing.over is Over.NONE:
            return
        until_ms = standing.resets_ms(facts.admitted_ms, timings.RETRY_AFTER_S)
        self._refused[facts.tenant] = until_ms, standing
        raise _refusal(standing, facts, path)


def _refusal(standing: Standing, facts: RequestFacts, path: str) -> RequestRefused:
    assert facts.reserved is not None, "only who has limits is refused"
    return standing.refusal(facts.reserved, path, facts.admitted_ms, timings.RETRY_AFTER_S)
