"""One run: a load on an endpoint, through a batcher. The endpoint is a server, whose streamed chats
are read token by token, or, in virtual time, the model of an engine.
"""

import asyncio
import random
import re
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any, NamedTuple
from urllib.request import ProxyHandler, Request, build_opener

import aiohttp
import msgspec
import numpy

from scripts.simulation.engine_model import EngineParameters, VirtualEngine
from scripts.simulation.engine_model import Sequence as EngineSequence
from scripts.simulation.workloads import poisson

from .batchers import Batcher, Job, alike

TIMEOUT_S = 120.0
"""For each request."""
# Servers close idle connections (uvicorn after 5 s); one that is older is not worth the race.
_REUSE_WITHIN_S = 2.0
_PAUSE_S = 0.2
_FETCH_TIMEOUT_S = 5.0
_WORDS = (
    "the river carries a letter from every harbour while seven clocks argue about rain and "
    "bread copper lanterns remember quiet engines under green mountains where nobody counts"
).split()
# Which field carries the first tokens of a reasoning model differs between servers.
_TEXT_FIELDS = ("content", "reasoning", "reasoning_content", "tool_calls")
_GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "num_preemptions_total",
)
"""vLLM's names for what a `Reading` has after its time."""
_LINE = re.compile(rf"^vllm:({'|'.join(_GAUGES)})(?:\{{[^}}]*\}})? (\S+)$", re.MULTILINE)


class SystemFailed(RuntimeError):
    """A system cannot be measured: it did not start or does not answer; the message says why. It is
    the one error that a user is told without a traceback.
    """


def fetch(url: str, api_key: str = "") -> str:
    """What a GET answers now; empty if that is not a 200. Not by httpx, which takes tens of
    milliseconds of CPU for a client, and this reads an engine's page while it is measured.
    """
    request = Request(url, headers={"authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        # No proxy: what is measured is on this machine, or named by its own address.
        with build_opener(ProxyHandler({})).open(request, timeout=_FETCH_TIMEOUT_S) as answer:
            return str(answer.read().decode())
    except (OSError, ValueError):  # no answer, or no URL
        return ""


class RequestMaker:
    """Makes one request after another for one server, equal for equal seeds, but for its words of
    one shape.
    """

    def __init__(
        self,
        url: str,
        model: str,
        api_key: str,
        prompt_chars: int,
        seed: int,
        embeddings: bool = False,
    ) -> None:
        self.embeddings = embeddings
        self.url = f"{url.rstrip('/')}/{'embeddings' if embeddings else 'chat/completions'}"
        self.headers = {"content-type": "application/json", "authorization": f"Bearer {api_key}"}
        self._model = model
        self._prompt_chars = prompt_chars
        self._rng = random.Random(seed)

    def next(self, max_tokens: int) -> bytes:
        """The next request's body."""
        words = self._rng.choices(_WORDS, k=self._prompt_chars // 3 + 1)
        content = " ".join(words)[: self._prompt_chars]
        if self.embeddings:
            return msgspec.json.encode({"model": self._model, "input": content})
        return msgspec.json.encode(
            {
                "model": self._model,
                "temperature": 0,
                "messages": [{"role": "user", "content": content}],
                "max_tokens": max_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
                # vLLM's own extension: every request then has one length, on every system.
                "ignore_eos": True,
            }
        )


@dataclass
class Exchange:
    """One job and what came of it. Times are those of the endpoint's clock. It is fed the body of
    the response in pieces of any size, and takes the number of tokens from the ``usage`` event at
    the end.
    """

    job: Job
    request: bytes = b""
    """Its body; empty until it is sent."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has its whole answer, or an error."""
    finished_s: float | None = None
    arrivals_s: "array[float]" = field(default_factory=lambda: array("d"))
    """When each event of a token came."""
    texts: list[str] = field(default_factory=list)
    events: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    done: bool = False
    closed: bool = False
    """Whether the server has ended the response; otherwise it broke off, or never came."""
    error: str | None = None
    _rest: bytes = b""

    @property
    def first_token_s(self) -> float | None:
        return self.arrivals_s[0] if self.arrivals_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Times between its events."""
        return [later_s - earlier_s for earlier_s, later_s in pairwise(self.arrivals_s)]

    def feed(self, piece: bytes, now_s: float) -> None:
        """The next bytes of the body have come."""
        *events, self._rest = (self._rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            lines = (line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
            if data := b"".join(lines):
                self._take(data, now_s)

    def _take(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        event = msgspec.json.decode(data)
        if error := event.get("error"):
            self.error = f"error event: {str(error)[:200]}"
        if usage := event.get("usage"):
            self.tokens, self.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
        choices = event.get("choices") or ()
        if not choices or (not self.events and not any(map(_is_made_by_token, choices))):
            return
        self.arrivals_s.append(now_s)
        self.texts += [choice.get("delta", {}).get("content") or "" for choice in choices]
        self.events += 1

    def feed_whole(self, body: bytes, now_s: float) -> None:
        """The answer to a request for an embedding, which counts as one token."""
        answer = msgspec.json.decode(body)
        self.tokens = self.events = len(answer["data"])
        self.prompt_tokens = answer["usage"]["prompt_tokens"]
        self.arrivals_s.append(now_s)

    def end(self) -> None:
        """The server has ended the response."""
        self.closed = True
        self.tokens = self.tokens or self.events
        if not self.done:
            self.error = self.error or "stream ended without its last event"


def _is_made_by_token(choice: dict[str, Any]) -> bool:
    """Whether a token caused this event: all do but the one that opens a chat with the role alone.

    An empty text counts: the bytes of one character can be spread over several tokens.
    """
    delta = choice.get("delta")
    return delta is None or "role" not in delta or any(delta.get(name) for name in _TEXT_FIELDS)


class Reading(NamedTuple):
    """What an engine does at a time; ``preemptions`` counts since its start."""

    running: float
    waiting: float
    kv_used: float
    preemptions: float


def read_page(url: str) -> Reading | None:
    """The values on a metrics page, those of several engines added; None if it has none of vLLM's
    or does not answer.
    """
    found: dict[str, float] = {}
    for name, value in _LINE.findall(fetch(url)):
        found[name] = found.get(name, 0.0) + float(value)
    return Reading(*(found.get(name, 0.0) for name in _GAUGES)) if found else None


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
    """Its engine is read so often."""

    def now_s(self) -> float:
        return time.perf_counter()

    async def answer(self, exchange: Exchange) -> None:
        """Send its job, and fill it in."""
        raise NotImplementedError

    async def read(self) -> Reading | None:
        """What the engine does now; None if nobody knows."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close its connections."""


class HttpEndpoint(Endpoint):
    """A server, and the page of its engine's metrics if it has one. Each request has a connection
    of its own while it is under way.
    """

    def __init__(self, maker: RequestMaker, page: str = "") -> None:
        self._maker = maker
        self._page = page
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_REUSE_WITHIN_S),
            timeout=aiohttp.ClientTimeout(TIMEOUT_S),
            headers=maker.headers,
        )

    async def answer(self, exchange: Exchange) -> None:
        """See `Endpoint`; what went wrong is in ``exchange.error``."""
        exchange.request = exchange.request or self._maker.next(exchange.job.output_tokens)
        try:
            async with self._session.post(self._maker.url, data=exchange.request) as answer:
                if answer.status != 200:
                    exchange.error = f"HTTP {answer.status}: {(await answer.text())[:160]}"
                elif self._maker.embeddings:
                    exchange.feed_whole(await answer.read(), time.perf_counter())
                else:
                    async for piece in answer.content.iter_any():
                        exchange.feed(piece, time.perf_counter())
                    exchange.end()
        except TimeoutError:
            exchange.error = f"no end within {TIMEOUT_S:g} s"
        except aiohttp.ClientError as broken:
            exchange.error = f"{type(broken).__name__}: {broken}"
            # A refusal comes at once: without a pause a closed loop would turn into a busy loop.
            if isinstance(broken, aiohttp.ClientConnectorError):
                await asyncio.sleep(_PAUSE_S)
        exchange.finished_s = time.perf_counter()

    async def read(self) -> Reading | None:
        return await asyncio.to_thread(read_page, self._page) if self._page else None

    async def close(self) -> None:
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
        engine = self._engine
        kv_used = engine.kv.used / engine.kv.total
        return Reading(len(engine.running), engine.waiting, kv_used, engine.preemptions)


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
    ended_s: float


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
        self._levels: list[tuple[float, int, int]] = []
        """At every turn: the time, and the requests under way and the slots from then on."""

    async def measure(self) -> Ran:
        load, endpoint, started_s = self._load, self._endpoint, self._endpoint.now_s()
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                coming = [group.create_task(self._user()) for _ in range(load.users)]
                if load.rate_per_s:
                    coming.append(group.create_task(self._arrivals(started_s)))
                readings = await self._window(coming)
                now_s, events = endpoint.now_s(), self._events()
                self._closing = True
                self._set_alarm(None)
                for task in coming:
                    task.cancel()
                if self._tasks:
                    _, late = await asyncio.wait(self._tasks, timeout=load.grace_s)
                    for task in late:
                        task.cancel()
        finally:
            await endpoint.close()
        exchanges, ended_s = list(self.exchanges.values()), endpoint.now_s()
        window_s = now_s - started_s
        times_s, *levels = numpy.array([*self._levels, (now_s, 0, 0)]).T
        used, slots = (float(numpy.diff(times_s) @ level[:-1]) / window_s for level in levels)
        return Ran(load, exchanges, readings, started_s, window_s, events, used, slots, ended_s)

    async def _window(self, coming: list[asyncio.Task[None]]) -> list[Reading]:
        """Keep up the load, and read the engine meanwhile."""
        load = self._load
        if load.window_s is None:
            await asyncio.wait(coming)
            return []
        readings = await self._watch(load.window_s)
        while len(self.exchanges) < load.least and not all(task.done() for task in coming):
            readings += await self._watch(self._endpoint.every_s)
        return readings

    async def _watch(self, duration_s: float) -> list[Reading]:
        """Read for ``duration_s``; the first and the last reading are at its ends."""
        endpoint = self._endpoint
        ends_s = endpoint.now_s() + duration_s
        readings = [await endpoint.read()]
        while (left_s := ends_s - endpoint.now_s()) > 0:
            await asyncio.sleep(min(endpoint.every_s, left_s))
            readings.append(await endpoint.read())
        return [one for one in readings if one is not None]

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
        self._levels.append((now_s, self._in_flight, self._batcher.slots or 0))

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


async def put(maker: RequestMaker, load: Load, max_tokens: int, requests: int | None = None) -> Ran:
    """Put ``load`` of requests that are all alike on a server, straight to its engine's own
    batching; ``requests`` bounds their number.
    """
    jobs = islice(alike(max_tokens), requests)
    return await Run(Batcher(None), HttpEndpoint(maker), load, jobs).measure()


async def one_exchange(maker: RequestMaker, max_tokens: int) -> Exchange:
    """A single request on a connection of its own.

    Raises:
        SystemFailed: it has no good answer.
    """
    load = Load(users=1, window_s=None)
    (exchange,) = (await put(maker, load, max_tokens, requests=1)).exchanges
    if exchange.error is not None:
        raise SystemFailed(f"{maker.url} does not answer: {exchange.error}")
    return exchange
