"""The service in virtual time: live dispatchers, schedulers and placement, a queue in memory, and
modelled engines.

What runs live is used as it is. What is replaced is what would touch the world: Redis (the queue),
Ray (the call to a replica) and the engine.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

import msgspec

from serve_app import timings
from serve_app.clock import RedisClock
from serve_app.cluster.members import Members
from serve_app.cluster.replicas import Replicas
from serve_app.contract import CompletionStats, EngineReport, IngressLease, WorkerLease
from serve_app.dispatch.attempts import StallTracker
from serve_app.dispatch.dispatcher import Dispatcher
from serve_app.errors import RequestRefused
from serve_app.loops import Loops
from serve_app.policy.classes import CLASSES, engine_priority
from serve_app.policy.order import DEFAULT_RULES
from serve_app.policy.overload import Asked, Overload
from serve_app.policy.tenant_lines import TenantRules
from serve_app.policy.work import Work as AskedWork
from serve_app.request_queue import QueueEntry
from workers.replica import Window

from . import virtual_time
from .engine_model import EngineParameters, VirtualEngine
from .engine_model import Sequence as EngineSequence
from .policies import POLICIES
from .virtual_time import VirtualClock
from .work import Record, Work

_TEXTS_APART = 1 << 32
"""Distance between the identities of two texts: more than one has blocks."""
_CLAIM_S = 0.3e-3
"""A round trip to Redis."""
_CALL_S = 1e-3
"""A call to a replica, until its engine has the request."""


@dataclass(frozen=True)
class Cluster:
    """What a simulation runs on."""

    engine: EngineParameters
    replicas: int = 1
    max_running_requests: int = 128
    """The setting `workers.max_running_requests`: slots of each engine."""
    ingresses: int = 1
    gather_ms: float = 0.0
    """How long a claim that waited for an arrival waits for more; live: not at all."""
    refuses: bool = False
    """Whether what would wait too long is refused, as live."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of tenants, if not 1."""

    @property
    def slots(self) -> int:
        return self.replicas * self.max_running_requests


@dataclass
class Outcome:
    """Everything that a simulation has seen."""

    cluster: Cluster
    policy: str
    records: list[Record]
    engines: list[VirtualEngine]
    wall_s: float
    """How long it took to simulate."""
    end_s: float
    """When the last request had ended, or the simulation was stopped."""
    round_trips: int
    """Claims."""


class VirtualQueue:
    """The queue of each class in memory, with the promises of the live one: oldest first, up to so
    many of each class in one claim, and a claim that waits is answered by the first arrival.

    All ingresses share it. A claim that may wait for arrivals and has some waits another `gather_s`
    for more.
    """

    def __init__(self, gather_s: float) -> None:
        self._gather_s = gather_s
        self._waiting: dict[str, deque[QueueEntry]] = {name: deque() for name in CLASSES}
        self._blocked: deque[tuple[Sequence[str], asyncio.Future[list[QueueEntry]]]] = deque()
        self._numbers = count()
        self.round_trips = 0

    def __len__(self) -> int:
        return sum(self.lengths().values())

    def lengths(self) -> dict[str, int]:
        """What nobody has claimed, by class."""
        return {name: len(entries) for name, entries in self._waiting.items()}

    def enqueue(self, request_id: str, work: Work, now_ms: int) -> None:
        name = work.request_class
        kind = f"chat/completions {work.kind}"
        asked = AskedWork(work.prompt_tokens, kind=kind, sequences=work.sequences)
        entry = QueueEntry(
            f"queue:{name}",
            f"{now_ms}-{next(self._numbers)}",
            name,
            request_id,
            work.tenant,
            work.session,
            now_ms + int(1000 * work.within_s),
            asked.cost_tokens,
            prompt_tokens=asked.prompt_tokens,
            kind=asked.kind,
            sequences=asked.sequences,
        )
        for place, (classes, answer) in enumerate(self._blocked):
            if name in classes:
                del self._blocked[place]
                answer.set_result([entry])
                return
        self._waiting[name].append(entry)

    async def claim(
        self, of_each: int, classes: Sequence[str] = CLASSES, wait: bool = True
    ) -> list[QueueEntry]:
        """See `RequestQueue.claim`."""
        self.round_trips += 1
        await asyncio.sleep(_CLAIM_S)
        taken = self._take(of_each, classes)
        if not wait or (taken and not self._gather_s):
            return taken
        taken = taken or await self._first(classes)
        if taken and self._gather_s:
            await asyncio.sleep(self._gather_s)
            taken += self._take(max(0, of_each - len(taken)), classes)
        return taken

    def _take(self, of_each: int, classes: Sequence[str]) -> list[QueueEntry]:
        taken: list[QueueEntry] = []
        for name in classes:
            waiting = self._waiting[name]
            taken += [waiting.popleft() for _ in range(min(of_each, len(waiting)))]
        return taken

    def remove(self, request_id: str) -> None:
        """Its request has ended while it waited."""
        for name, waiting in self._waiting.items():
            self._waiting[name] = deque(one for one in waiting if one.request_id != request_id)

    async def _first(self, classes: Sequence[str]) -> list[QueueEntry]:
        answer: asyncio.Future[list[QueueEntry]] = asyncio.get_running_loop().create_future()
        blocked = (classes, answer)
        self._blocked.append(blocked)
        try:
            async with asyncio.timeout(timings.CLAIM_BLOCK_MS / 1000):
                return await answer
        except TimeoutError:
            return []
        finally:
            if blocked in self._blocked:
                self._blocked.remove(blocked)


class _Untold:
    """In place of the metrics, which other orders of work do not have."""

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_: None


class VirtualIngress:
    """One ingress process: its dispatcher, and its view of the replicas."""

    may_be_claimed = False
    """See `QueueDepths`: nothing is ever lost in this queue."""

    def __init__(self, service: "VirtualService", name: str, policy: str) -> None:
        cluster = service.cluster
        self._service = service
        self._loop = asyncio.get_running_loop()
        self.name = name
        self.replicas = Replicas()
        self.stalls = StallTracker()
        clock = RedisClock(VirtualClock(self._loop))
        # The queue, its depths and the attempts are those of this file.
        queue: Any = service.queue
        this: Any = self
        rules = DEFAULT_RULES._replace(
            engine_slots=cluster.max_running_requests, tenants=TenantRules(cluster.weights)
        )
        self.overload = Overload(weights=cluster.weights)
        me = IngressLease(name, "session-1", model="model")
        telemetry: Any = _Untold()
        self.dispatcher = Dispatcher(
            queue, this, this, self.replicas, me, clock, Loops(), telemetry, rules, self.overload
        )
        self.dispatcher.unclaimed = queue.lengths
        if policy != "hermes":
            self.dispatcher._scheduler = POLICIES[policy](service.records)

    async def run(self, entry: QueueEntry) -> CompletionStats:
        """As `Attempts.run`: place the request, and stay with it to its last token."""
        record = self._service.records[entry.request_id]
        if record.ended_s is not None:
            return CompletionStats(0, whole=False, begun=False)
        self._service.begun(record)
        left_s = record.arrived_s + record.work.within_s - self._loop.time()
        record.started_s = self._loop.time()
        key = entry.session or entry.request_id
        placed = self.replicas.place(key, entry.sequences, lambda _: None)
        whole = False
        try:
            async with asyncio.timeout(left_s):
                await self._service.generate(record, placed.replica)
                whole = True
        except TimeoutError:
            pass
        finally:
            self.replicas.release(placed)
        self._service.ended(record, expired=not whole)
        return CompletionStats(record.tokens, whole, prompt_tokens=record.work.prompt_tokens)


class VirtualService:
    """Ingresses, queue and engines; sources `submit` work while it runs."""

    def __init__(self, cluster: Cluster, policy: str) -> None:
        self.cluster = cluster
        self.policy = policy
        self.queue = VirtualQueue(cluster.gather_ms / 1e3)
        self.records: dict[str, Record] = {}
        self._loop = asyncio.get_running_loop()
        self._ends: dict[str, asyncio.Future[Record]] = {}
        self._due: list[tuple[float, str]] = []
        self._texts = 0
        self._accepted: dict[str, tuple[VirtualIngress, float]] = {}
        """Where each waiting request was accepted, and its cost."""
        self.beside: tuple[IngressLease, ...] = ()
        """Of other ingresses in the namespace, which are not simulated."""
        most = min(cluster.engine.max_num_seqs, cluster.max_running_requests)
        parameters = msgspec.structs.replace(cluster.engine, max_num_seqs=most)
        names = sorted(f"replica-{number}" for number in range(cluster.replicas))
        self._engines = {name: VirtualEngine(parameters) for name in names}
        self._windows = {name: Window(cluster.max_running_requests) for name in names}
        self._ingresses = [
            VirtualIngress(self, f"ingress-{number}", policy) for number in range(cluster.ingresses)
        ]

    async def run(self, sources: Sequence["Source"], until_s: float | None) -> None:
        """Until all work has ended, or until `until_s`."""
        random.seed(0)  # the pauses of the dispatchers are drawn at random
        self._read_members()
        for ingress in self._ingresses:
            await ingress.dispatcher.start()
        leases = asyncio.create_task(self._keep_reading())
        with suppress(TimeoutError):
            async with asyncio.timeout(until_s):
                async with asyncio.TaskGroup() as group:
                    for source in sources:
                        group.create_task(source(self))
                while self._ends:
                    await next(iter(self._ends.values()))
        leases.cancel()
        for engine in self._engines.values():
            engine.stop()
        for ingress in self._ingresses:
            await ingress.dispatcher.stop()

    @property
    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return self._loop.time()

    def submit(self, work: Work, retry_of: Record | None = None) -> "asyncio.Future[Record]":
        """A request arrives. The future ends with the request. One that is too long for the engine
        is refused, as vLLM would.
        """
        if not work.base:
            self._texts += work.sequences
            work = work._replace(base=-self._texts * _TEXTS_APART)
        request_id = f"req_{len(self.records)}"
        record = Record(request_id, work, self.now_s, retry_of=retry_of)
        self.records[request_id] = record
        end: asyncio.Future[Record] = self._loop.create_future()
        if work.prompt_tokens + work.output_tokens > self.cluster.engine.longest():
            record.refused = True
            end.set_result(record)
            return end
        now_ms = int(VirtualClock(self._loop).unix_s() * 1000)
        if self.cluster.refuses:
            try:
                self._accept(record, now_ms)
            except RequestRefused as refusal:
                record.refused, record.retry_after_s = True, refusal.retry_after_s
                end.set_result(record)
                return end
        self._ends[request_id] = end
        heappush(self._due, (self.now_s + work.within_s, request_id))
        self.queue.enqueue(request_id, work, now_ms)
        return end

    def _accept(self, record: Record, now_ms: int) -> None:
        """What the admission of the ingress does to which the request comes."""
        work, ingress = record.work, random.choice(self._ingresses)
        deadline_ms = now_ms + int(1000 * work.within_s)
        kind, digest = (
            f"chat/completions {work.kind}",
            f"{abs(work.base) // _TEXTS_APART % 2**32:08x}",
        )
        what = work.prompt_tokens, 0, work.sequences, kind, False, digest
        asked = Asked(work.request_class, work.tenant, now_ms, deadline_ms, *what)
        expected = ingress.dispatcher.expected(asked)
        ingress.overload.check(asked, expected)
        ingress.overload.promises.kept(asked)
        ingress.overload.enters(asked.request_class, asked.tenant, expected.cost)
        self._accepted[record.request_id] = (ingress, expected.cost)

    def begun(self, record: Record) -> None:
        """A worker has started it, or it has ended before."""
        if (accepted := self._accepted.pop(record.request_id, None)) is not None:
            ingress, cost = accepted
            ingress.overload.enters(record.work.request_class, record.work.tenant, -cost)

    async def generate(self, record: Record, replica: str) -> None:
        """As the worker's `execute`."""
        engine, work = self._engines[replica], record.work
        priority = engine_priority(work.request_class, work.sequences > 1)
        blocks = work.prompt_tokens // self.cluster.engine.block_size
        prompt = range(work.base, work.base + blocks)  # which the sequences share
        bases = [work.base + number * _TEXTS_APART for number in range(work.sequences)]
        sequences = [
            EngineSequence(work.prompt_tokens, work.output_tokens, priority, base, prompt)
            for base in bases
        ]
        await asyncio.sleep(_CALL_S)
        runs = [engine.run(one, lambda: self._first_token(record)) for one in sequences]
        try:
            await (asyncio.gather(*runs) if len(runs) > 1 else runs[0])
        finally:
            record.tokens = sum(one.produced for one in sequences)
            record.preemptions = sum(one.preemptions for one in sequences)

    def ended(self, record: Record, expired: bool = False) -> None:
        record.ended_s, record.expired = self.now_s, expired
        self._ends.pop(record.request_id).set_result(record)

    def outcome(self, wall_s: float) -> Outcome:
        return Outcome(
            self.cluster,
            self.policy,
            list(self.records.values()),
            list(self._engines.values()),
            wall_s,
            self.now_s,
            self.queue.round_trips,
        )

    def _first_token(self, record: Record) -> None:
        if record.first_token_s is None:
            record.first_token_s = self.now_s

    def _lease(self, report: EngineReport) -> WorkerLease:
        """First come, first served knows no window."""
        window = self._windows[report.name]
        if self.policy != "fcfs":
            window.reported(report)
        return WorkerLease(report.name, window.slots)

    async def _keep_reading(self) -> None:
        """Ingresses read the leases twice a second, and as often deadlines are looked at."""
        while True:
            await asyncio.sleep(timings.LEASE_RENEW_S)
            self._end_overdue()
            self._read_members()

    def _end_overdue(self) -> None:
        """As `Deadlines`, what has not started."""
        while self._due and self._due[0][0] <= self.now_s:
            record = self.records[heappop(self._due)[1]]
            if record.started_s is None:
                self.begun(record)
                self.ended(record, expired=True)
                self.queue.remove(record.request_id)
                for ingress in self._ingresses:
                    ingress.dispatcher.on_end(record.request_id)

    def _read_members(self) -> None:
        unclaimed = len(self.queue)
        own = [one.dispatcher.lease(True, unclaimed) for one in self._ingresses]
        leases = (*own, *self.beside)
        reports = tuple(engine.report(name) for name, engine in self._engines.items())
        workers = tuple(self._lease(one) for one in reports)
        members = Members(leases, workers, trusted=True, engines=reports)
        for ingress in self._ingresses:
            ingress.replicas.serving(self._engines)
            ingress.dispatcher.on_members(members)


Source = Callable[[VirtualService], Coroutine[Any, Any, None]]
"""Submits work until it is done. What it has submitted may still run then."""


def simulate(
    cluster: Cluster,
    sources: Sequence[Source],
    policy: str = "hermes",
    until_s: float | None = None,
) -> Outcome:
    """Run until all work has ended, or until `until_s`; what waits or runs then stays open."""
    began_s = time.perf_counter()

    async def main() -> Outcome:
        service = VirtualService(cluster, policy)
        await service.run(sources, until_s)
        return service.outcome(time.perf_counter() - began_s)

    return virtual_time.run(main())
