"""The service in virtual time: live dispatchers, schedulers and placement, a queue in memory, and
modelled engines.

What runs live is used as it is. What is replaced is what would touch the world: Redis (the queue),
Ray (the call to a replica) and the engine.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from scripts.simulation.engine_model import Sequence
from scripts.simulation.engines import EngineParameters
from serve_app import timings
from serve_app.cluster.members import Members
from serve_app.contract import EngineReport, WorkerLease
from serve_app.policy.classes import CLASSES
from workers.window import Window

from .engine import VirtualEngine
from .ingress import VirtualIngress
from .queue import VirtualQueue
from .virtual_time import VirtualClock
from .work import Record, Work

_TEXTS_APART = 1 << 32
"""Distance between the identities of two texts: more than one has blocks."""


@dataclass(frozen=True)
class Cluster:
    """What a simulation runs on."""

    engine: EngineParameters
    replicas: int = 1
    max_running_requests: int = 128
    """The setting `workers.max_running_requests`: slots of each engine."""
    ingresses: int = 1
    load_factor: float = 1.25
    virtual_nodes: int = 128
    claim_ms: float = 0.3
    """A round trip to Redis."""
    gather_ms: float = 0.0
    """How long a claim that waited for an arrival waits for more; live: not at all."""
    call_ms: float = 1.0
    """A call to a replica, until its engine has the request."""
    replay_ms: float = 0.1
    """What a worker needs for each token that is written already, before it continues."""

    @property
    def slots(self) -> int:
        """Requests that all engines run at a time."""
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
    served: dict[str, int] = field(default_factory=dict)
    """Tokens generated, by tenant."""


class VirtualService:
    """Ingresses, queue and engines. Use it as an asynchronous context manager under
    `virtual_time.run`; `submit` work, and read the `outcome` at the end.
    """

    def __init__(self, cluster: Cluster, policy: str = "hermes") -> None:
        self.cluster = cluster
        self.policy = policy
        self.queue = VirtualQueue(cluster.claim_ms / 1e3, cluster.gather_ms / 1e3)
        self.records: dict[str, Record] = {}
        self.started: list[str] = []
        """The requests in the order in which they were sent to engines."""
        self._loop = asyncio.get_running_loop()
        self._ends: dict[str, asyncio.Future[Record]] = {}
        self._generating: dict[str, tuple[VirtualEngine, Sequence]] = {}
        self._texts = 0
        self.engines = [
            VirtualEngine(f"replica-{number}", cluster.engine) for number in range(cluster.replicas)
        ]
        self._leased = {engine.name for engine in self.engines}
        self._windows = {
            engine.name: Window(cluster.max_running_requests) for engine in self.engines
        }
        self._by_name = {engine.name: engine for engine in self.engines}
        self._ingresses = [
            VirtualIngress(self, f"ingress-{number}", policy) for number in range(cluster.ingresses)
        ]
        self._leases: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "VirtualService":
        self._read_members()
        for ingress in self._ingresses:
            await ingress.dispatcher.start()
        self._leases = asyncio.create_task(self._keep_reading())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._leases is not None
        self._leases.cancel()
        for engine in self.engines:
            engine.settle()
        for ingress in self._ingresses:
            await ingress.dispatcher.stop()

    @property
    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return self._loop.time()

    def submit(self, work: Work) -> "asyncio.Future[Record]":
        """A request arrives. The future ends with the request. One that is too long for the engine
        is refused, as vLLM would.
        """
        if not work.base:
            self._texts += 1
            work = work._replace(base=-self._texts * _TEXTS_APART)
        request_id = f"req_{len(self.records)}"
        record = Record(request_id, work, self.now_s)
        self.records[request_id] = record
        end: asyncio.Future[Record] = self._loop.create_future()
        if work.prompt_tokens + work.output_tokens > self.cluster.engine.longest():
            record.refused = True
            end.set_result(record)
            return end
        self._ends[request_id] = end
        clock = VirtualClock(self._loop)
        self.queue.enqueue(request_id, work, int(clock.unix_s() * 1000))
        return end

    async def generate(self, record: Record, replica: str) -> None:
        """As the worker's `execute`: the engine continues after the tokens that are there.

        Raises:
            EngineStopped: the engine failed.
        """
        self.started.append(record.request_id)
        engine, work = self._by_name[replica], record.work
        already = record.tokens
        sequence = Sequence(
            work.prompt_tokens + already,
            work.output_tokens - already,
            CLASSES.index(work.request_class),
            work.base,
            work.prefix,
        )
        replay_ms = already * self.cluster.replay_ms
        await asyncio.sleep((self.cluster.call_ms + replay_ms) / 1e3)
        self._generating[record.request_id] = engine, sequence
        try:
            await engine.run(sequence, lambda: self._first_token(record))
        finally:
            del self._generating[record.request_id]
            record.tokens = already + sequence.produced
            record.hit_tokens += sequence.hit_tokens
            record.preemptions += sequence.preemptions

    def ended(self, record: Record) -> None:
        """A request has ended."""
        record.ended_s = self.now_s
        self._ends.pop(record.request_id).set_result(record)

    async def all_ended(self) -> None:
        """Return when no request is open."""
        while self._ends:
            await next(iter(self._ends.values()))

    async def fault(self, kind: str, number: int, back_after_s: float) -> None:
        """`stop` or `hang` an engine. A hanging engine is found out when its lease has expired."""
        engine = self.engines[number]
        if kind == "hang":
            engine.hang()
            await asyncio.sleep(timings.LEASE_MS / 1000)
        engine.stop()
        self._leased.discard(engine.name)
        self._read_members()
        await asyncio.sleep(back_after_s)
        engine.restart()
        self._leased.add(engine.name)
        self._read_members()

    def outcome(self, wall_s: float) -> Outcome:
        """What has happened so far."""
        served: Counter[str] = Counter()
        for record in self.records.values():
            served[record.work.tenant] += record.tokens
        records = list(self.records.values())
        return Outcome(
            self.cluster,
            self.policy,
            records,
            self.engines,
            wall_s,
            self.now_s,
            self.queue.round_trips,
            dict(served),
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
        """Ingresses read the leases twice a second, and look at deadlines then."""
        while True:
            await asyncio.sleep(timings.LEASE_RENEW_S)
            self._read_members()

    def _read_members(self) -> None:
        leases = tuple(one.dispatcher.lease(complete=True) for one in self._ingresses)
        reports = tuple(self._by_name[name].report() for name in sorted(self._leased))
        workers = tuple(self._lease(one) for one in reports)
        for ingress in self._ingresses:
            ingress.replicas.serving(sorted(self._leased))
            ingress.dispatcher.on_members(Members(leases, workers, trusted=True, engines=reports))
