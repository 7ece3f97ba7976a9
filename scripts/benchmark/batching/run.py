"""One batcher under one load: who submits jobs, and what came of each."""

import asyncio
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..connection import Exchange
from ..pool import ConnectionPool
from ..prompts import RequestMaker
from ..stats import poisson_arrivals_s
from .front import Front
from .job import Demand, Job, mix
from .server import Server
from .specification import Specification


@dataclass(frozen=True)
class Pressure:
    """How many jobs come: ``users`` who each wait for an answer before the next request, or
    ``rate_per_s`` arrivals whatever happens. ``seed`` decides lengths, classes and arrivals.
    """

    name: str
    users: int
    rate_per_s: float
    window_s: float
    timeout_s: float
    seed: str


@dataclass
class Served:
    """One job and what came of it: nothing, if it was never sent."""

    job: Job
    exchange: Exchange | None = None
    broken_off: bool = False

    @property
    def ended(self) -> bool:
        """Whether it has its whole answer, or an error."""
        return self.exchange is not None and not self.broken_off


@dataclass
class Ran:
    """A run; throughput refers to the window, in which the load was kept up."""

    served: list[Served] = field(default_factory=list)
    window_s: float = 0.0
    window_events: int = 0
    ended_s: float = 0.0
    in_flight: float = 0.0
    slots: float = 0.0
    loop_share: float = 0.0
    server_cpu_s: float = 0.0
    turns: int = 0
    turn_s: float = 0.0


class Run:
    """Puts ``pressure`` on a batcher for its window. Then nothing more is sent, what has been sent
    gets as long as the window to end, and the rest is broken off.
    """

    def __init__(
        self,
        specification: Specification,
        maker: RequestMaker,
        pressure: Pressure,
        prompt_tokens: int,
        server: Server,
    ) -> None:
        self._maker = maker
        self._pressure = pressure
        self._prompt_tokens = prompt_tokens
        self._server = server
        self._pool = ConnectionPool(maker, pressure.timeout_s)
        self._front = Front(specification.make(pressure.users or None), self._send)
        self._demands: Iterator[Demand] = mix(pressure.seed, maker.shape.max_tokens)
        self._served: dict[Job, Served] = {}
        self._closing = False

    async def measure(self) -> Ran:
        """Run to the end."""
        ran, pressure = Ran(), self._pressure
        try:
            async with asyncio.TaskGroup() as group:
                if pressure.rate_per_s:
                    group.create_task(self._arrivals(group))
                for _ in range(pressure.users):
                    group.create_task(self._user())
                await self._observe(ran)
                self._closing = True
                await self._front.close(pressure.window_s)
        finally:
            self._pool.close()
        ran.ended_s = time.perf_counter()
        ran.served = list(self._served.values())
        return ran

    async def _observe(self, ran: Ran) -> None:
        """Wait for the end of the window and fill in what holds for the window alone."""
        server_cpu_s = self._server.cpu_s()
        cpu_s, started_s = time.thread_time(), time.perf_counter()
        await asyncio.sleep(self._pressure.window_s)
        now_s, front = time.perf_counter(), self._front
        ran.window_s = now_s - started_s
        ran.loop_share = (time.thread_time() - cpu_s) / ran.window_s
        ran.server_cpu_s = self._server.cpu_s() - server_cpu_s
        ran.in_flight = front.running.mean(now_s)
        ran.slots = front.slots.mean(now_s)
        ran.turns, ran.turn_s = front.turns, front.turn_s
        sent = (one.exchange for one in self._served.values())
        ran.window_events = sum(exchange.events for exchange in sent if exchange is not None)

    async def _user(self) -> None:
        while not self._closing:
            await self._front.perform(self._job(time.perf_counter()))

    async def _arrivals(self, group: asyncio.TaskGroup) -> None:
        pressure, started_s = self._pressure, time.perf_counter()
        seed = zlib.crc32(pressure.seed.encode())
        for arrival_s in poisson_arrivals_s(pressure.rate_per_s, pressure.window_s, seed):
            await asyncio.sleep(started_s + arrival_s - time.perf_counter())
            if self._closing:
                return
            group.create_task(self._front.perform(self._job(started_s + arrival_s)))

    def _job(self, arrived_s: float) -> Job:
        demand = next(self._demands)
        job = Job(
            len(self._served),
            arrived_s,
            self._prompt_tokens,
            demand.output_tokens,
            demand.interactive,
        )
        self._served[job] = Served(job)
        return job

    async def _send(self, job: Job) -> None:
        served = self._served[job]
        # Latency counts from the arrival: the wait for the batcher is part of it.
        served.exchange = Exchange(job.arrived_s)
        try:
            await self._pool.perform(self._maker.next(job.output_tokens), served.exchange)
        except asyncio.CancelledError:
            served.broken_off = True
            raise
