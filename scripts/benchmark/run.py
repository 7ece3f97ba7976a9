"""One run: a load on an endpoint, through a batcher. The endpoint is a server or, in virtual time,
the model of an engine.
"""

import asyncio
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import aiohttp

from scripts.simulation.engine_model import EngineParameters, VirtualEngine
from scripts.simulation.engine_model import Sequence as EngineSequence
from scripts.simulation.workloads import poisson

from .batchers import Batcher, Job, alike
from .client import Exchange, RequestMaker, SystemFailed, fetch

TIMEOUT_S = 120.0
"""For each request."""
# Servers close idle connections (uvicorn after 5 s); one that is older is not worth the race.
_REUSE_WITHIN_S = 2.0
_PAUSE_S = 0.2

GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "num_preemptions_total",
)
"""vLLM's names for what a `Reading` has after its time."""
_LINE = re.compile(rf"^vllm:({'|'.join(GAUGES)})(?:\{{[^}}]*\}})? (\S+)$", re.MULTILINE)


class Reading(NamedTuple):
    """One reading; ``preemptions`` counts since the engine's start."""

    at_s: float
    running: float
    waiting: float
    kv_used: float
    preemptions: float


def parse_page(page: str, at_s: float) -> Reading | None:
    """The values on a metrics page, those of several engines added; None if it has none of
    vLLM's.
    """
    found: dict[str, float] = {}
    for name, value in _LINE.findall(page):
        found[name] = found.get(name, 0.0) + float(value)
    if GAUGES[0] not in found:
        return None
    return Reading(at_s, *(found.get(name, 0.0) for name in GAUGES))


class EnginePage:
    """A page with vLLM's metrics."""

    def __init__(self, url: str) -> None:
        self._url = url
        if parse_page(fetch(url), 0.0) is None:
            raise SystemFailed(f"{url} has none of vLLM's metrics")

    async def read(self) -> Reading | None:
        """Read it now; None if it does not answer."""
        page = await asyncio.to_thread(fetch, self._url)
        return parse_page(page, time.perf_counter())


@dataclass(frozen=True)
class Load:
    """How many jobs come: ``users`` who each wait for an answer before the next request, or
    ``rate_per_s`` arrivals whatever happens. ``seed`` decides lengths, classes and arrivals.

    Load is kept up for ``window_s`` (None: until the jobs are used up), but not before ``least``
    jobs have come: a shorter run would measure the ramp. What still runs at its end gets
    ``grace_s``.
    """

    users: int = 0
    rate_per_s: float = 0.0
    window_s: float | None = 10.0
    grace_s: float = TIMEOUT_S
    least: int = 0
    seed: str = ""
    label: str = ""

    @property
    def name(self) -> str:
        """The load in a table."""
        return self.label or (f"{self.rate_per_s:g}/s" if self.rate_per_s else str(self.users))


class Endpoint:
    """What answers, with a clock of its own, and says what its engine does."""

    every_s = 0.2

    def now_s(self) -> float:
        return time.perf_counter()

    async def answer(self, exchange: Exchange) -> None:
        """Send its job, and fill it in."""
        raise NotImplementedError

    async def read(self) -> Reading | None:
        """What the engine does now; None if nobody knows."""
        return None

    async def watch(self, duration_s: float) -> list[Reading]:
        """Read for ``duration_s``; the first and the last reading are at its ends."""
        ends_s = self.now_s() + duration_s
        readings = [await self.read()]
        while (left_s := ends_s - self.now_s()) > 0:
            await asyncio.sleep(min(self.every_s, left_s))
            readings.append(await self.read())
        return [one for one in readings if one is not None]

    async def close(self) -> None:
        """Close its connections."""


class HttpEndpoint(Endpoint):
    """A server, and its engine's metrics if it has any. Each request has a connection of its own
    while it is under way.
    """

    def __init__(self, maker: RequestMaker, page: EnginePage | None = None) -> None:
        self._maker = maker
        self._page = page
        self._session: aiohttp.ClientSession | None = None

    async def answer(self, exchange: Exchange) -> None:
        """See `Endpoint`; what went wrong is in ``exchange.error``."""
        request = self._maker.next(exchange.job.output_tokens)
        self._session = self._session or aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_REUSE_WITHIN_S),
            timeout=aiohttp.ClientTimeout(TIMEOUT_S),
            headers=self._maker.headers,
        )
        try:
            async with self._session.post(self._maker.url, data=request) as answer:
                if answer.status != 200:
                    exchange.error = f"HTTP {answer.status}: {(await answer.text())[:160]}"
                else:
                    async for piece in answer.content.iter_any():
                        exchange.feed(piece, time.perf_counter())
                    exchange.end()
        except TimeoutError:
            exchange.error = f"no end within {TIMEOUT_S:g} s"
        except aiohttp.ClientConnectorError as refused:
            exchange.error = f"cannot connect: {refused}"
            # A refusal comes at once: without a pause a closed loop would turn into a busy loop.
            await asyncio.sleep(_PAUSE_S)
        except aiohttp.ClientError as broken:
            exchange.error = f"broken response: {broken}"
        exchange.finished_s = time.perf_counter()

    async def read(self) -> Reading | None:
        return None if self._page is None else await self._page.read()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class ModelEndpoint(Endpoint):
    """The model of an engine on an event loop in virtual time."""

    every_s = 0.05

    def __init__(self, parameters: EngineParameters) -> None:
        self._loop = asyncio.get_running_loop()
        self._engine = VirtualEngine(parameters)
        self._answers: dict[EngineSequence, Exchange] = {}

    def now_s(self) -> float:
        return self._loop.time()

    async def answer(self, exchange: Exchange) -> None:
        job = exchange.job
        # Each prompt is a text of its own: the prefix cache has none of it.
        base = -(job.number + 1) << 20
        sequence = EngineSequence(job.prompt_tokens, job.output_tokens, base=base)
        self._answers[sequence] = exchange
        await self._engine.run(sequence, lambda: None)
        del self._answers[sequence]
        exchange.events = exchange.tokens = sequence.produced
        exchange.finished_s = self.now_s()

    async def read(self) -> Reading:
        """See `Endpoint`; also counts the tokens of what runs."""
        for sequence, exchange in self._answers.items():
            exchange.events = sequence.produced
        model = self._engine.model
        kv_used = model.kv.used / model.kv.total
        return Reading(self.now_s(), len(model.running), model.waiting, kv_used, model.preemptions)


class Occupancy:
    """Fed with every change of a number; knows its mean over time from the first change on."""

    def __init__(self, now_s: float) -> None:
        self._started_s = self._changed_s = now_s
        self._value = 0.0
        self._area = 0.0

    def note(self, now_s: float, value: float) -> None:
        """The number is ``value`` from ``now_s`` on."""
        self._area += self._value * (now_s - self._changed_s)
        self._changed_s, self._value = now_s, value

    def mean(self, now_s: float) -> float:
        """The mean from the start to ``now_s``; 0 if no time has passed."""
        passed_s = now_s - self._started_s
        area = self._area + self._value * (now_s - self._changed_s)
        return area / passed_s if passed_s > 0 else 0.0


@dataclass
class Ran:
    """A run; all but ``exchanges`` and ``ended_s`` holds for the window."""

    load: Load
    exchanges: list[Exchange]
    """One for each job that has come, also if it was never sent."""
    readings: list[Reading]
    started_s: float
    window_s: float
    window_events: int
    in_flight: float
    slots: float
    ended_s: float = 0.0


class Run:
    """Puts ``load`` on a batcher for its window. Then nothing more is sent, what has been sent gets
    its grace to end, and the rest is broken off.

    It has no loop that turns the batcher: an arrival, an end and the batcher's own time each cause
    one turn.
    """

    def __init__(
        self, batcher: Batcher, endpoint: Endpoint, load: Load, jobs: Iterator[Job]
    ) -> None:
        self._batcher = batcher
        self._endpoint = endpoint
        self._load = load
        self._jobs = jobs
        self.exchanges: dict[int, Exchange] = {}
        """By number of the job."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._alarm: asyncio.TimerHandle | None = None
        self._closing = False
        self._in_flight = 0
        self._running = Occupancy(endpoint.now_s())
        self._slots = Occupancy(endpoint.now_s())

    async def measure(self) -> Ran:
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                coming = [group.create_task(self._user()) for _ in range(self._load.users)]
                if self._load.rate_per_s:
                    coming.append(group.create_task(self._arrivals(self._endpoint.now_s())))
                ran = await self._window(coming)
                self._closing = True
                self._set_alarm(None)
                for task in coming:
                    task.cancel()
                if self._tasks:
                    _, late = await asyncio.wait(self._tasks, timeout=self._load.grace_s)
                    for task in late:
                        task.cancel()
        finally:
            await self._endpoint.close()
        ran.ended_s = self._endpoint.now_s()
        ran.exchanges = list(self.exchanges.values())
        return ran

    async def _window(self, coming: list[asyncio.Task[None]]) -> Ran:
        load, endpoint, readings = self._load, self._endpoint, list[Reading]()
        started_s, events_before = endpoint.now_s(), self._events()
        if load.window_s is None:
            await asyncio.wait(coming)
        else:
            readings = await endpoint.watch(load.window_s)
            while len(self.exchanges) < load.least and not all(task.done() for task in coming):
                readings += await endpoint.watch(endpoint.every_s)
        now_s = endpoint.now_s()
        events, window_s = self._events() - events_before, now_s - started_s
        means = self._running.mean(now_s), self._slots.mean(now_s)
        return Ran(load, [], readings, started_s, window_s, events, *means)

    def _events(self) -> int:
        return sum(one.events for one in self.exchanges.values())

    async def _user(self) -> None:
        for job in self._jobs:
            await self._submit(job, self._endpoint.now_s()).ended.wait()

    async def _arrivals(self, started_s: float) -> None:
        load = self._load
        arrivals_s = poisson(load.rate_per_s, load.window_s or 0.0, load.seed)
        for arrival_s, job in zip(arrivals_s, self._jobs, strict=False):
            await asyncio.sleep(started_s + arrival_s - self._endpoint.now_s())
            # Latency counts from when the user wanted the answer, not from when the generator got
            # to it.
            self._submit(job, started_s + arrival_s)

    def _submit(self, job: Job, arrived_s: float) -> Exchange:
        # Latency counts from the arrival: the wait for the batcher is part of it.
        job = job._replace(arrived_s=arrived_s)
        self.exchanges[job.number] = exchange = Exchange(job)
        self._batcher.add(job)
        self._turn()
        return exchange

    def _turn(self) -> None:
        if self._closing:
            return
        now_s = self._endpoint.now_s()
        for job in self._batcher.next(now_s):
            task = self._group.create_task(self._send(self.exchanges[job.number]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            self._in_flight += 1
        self._set_alarm(self._batcher.wake_s())
        self._running.note(now_s, self._in_flight)
        self._slots.note(now_s, self._batcher.slots or 0)

    def _set_alarm(self, wake_s: float | None) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None
        if wake_s is not None:
            delay_s = max(0.0, wake_s - self._endpoint.now_s())
            self._alarm = asyncio.get_running_loop().call_later(delay_s, self._turn)

    async def _send(self, exchange: Exchange) -> None:
        await self._endpoint.answer(exchange)
        self._batcher.ended(exchange.job)
        self._in_flight -= 1
        exchange.ended.set()
        self._turn()


async def put(maker: RequestMaker, load: Load, requests: int | None = None) -> Ran:
    """Put ``load`` of requests that are all alike on a server, straight to its engine's own
    batching; ``requests`` bounds their number.
    """
    jobs = islice(alike(maker.shape.max_tokens), requests)
    return await Run(Batcher(None), HttpEndpoint(maker), load, jobs).measure()


async def one_exchange(maker: RequestMaker) -> Exchange:
    """A single request on a connection of its own.

    Raises:
        SystemFailed: it has no good answer.
    """
    (exchange,) = (await put(maker, Load(users=1, window_s=None), requests=1)).exchanges
    if exchange.error is not None:
        raise SystemFailed(f"{maker.url} does not answer: {exchange.error}")
    return exchange
