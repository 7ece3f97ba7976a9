"""Puts load on one endpoint, closed loop or open loop, and gathers every exchange."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .connection import Exchange
from .errors import SystemFailed
from .pool import ConnectionPool
from .prompts import RequestMaker
from .stats import poisson_arrivals_s


@dataclass(frozen=True)
class Load:
    """How much load and for how long: ``concurrency`` users, or ``rate_per_s`` arrivals.

    ``requests`` ends a closed loop after so many requests, else ``duration_s`` ends it, but not
    before as many requests have ended as there are users: a shorter run would measure the ramp.
    What still runs then is finished and counts, but its late tokens count for no throughput.
    """

    concurrency: int = 0
    rate_per_s: float = 0.0
    requests: int = 0
    duration_s: float = 10.0
    timeout_s: float = 120.0
    seed: int = 0


@dataclass
class LoadResult:
    """All exchanges; ``window_s`` is the time that throughput refers to, ``wall_s`` the whole
    run.
    """

    exchanges: list[Exchange] = field(default_factory=list)
    window_s: float = 0.0
    window_events: int = 0
    wall_s: float = 0.0


class Generator:
    """The loops that put load on one server."""

    def __init__(self, maker: RequestMaker, load: Load) -> None:
        self._maker = maker
        self._load = load
        self._pool = ConnectionPool(maker, load.timeout_s)
        self._result = LoadResult()

    async def run(self) -> LoadResult:
        """Run the load to its end; the connections are closed afterwards."""
        started_s = time.perf_counter()
        try:
            await (
                self._open_loop(started_s)
                if self._load.rate_per_s
                else self._closed_loop(started_s)
            )
        finally:
            self._pool.close()
        self._result.wall_s = time.perf_counter() - started_s
        return self._result

    def _close_window(self, started_s: float) -> None:
        """The load is no longer kept up from now on."""
        if not self._result.window_s:
            self._result.window_s = time.perf_counter() - started_s
            self._result.window_events = sum(exchange.events for exchange in self._result.exchanges)

    async def _closed_loop(self, started_s: float) -> None:
        load = self._load
        begun = 0

        def may_start() -> bool:
            nonlocal begun
            enough = (
                time.perf_counter() - started_s >= load.duration_s and begun >= 2 * load.concurrency
            )
            if begun >= load.requests if load.requests else enough:
                self._close_window(started_s)
                return False
            begun += 1
            return True

        async with asyncio.TaskGroup() as group:
            for _ in range(min(load.concurrency, load.requests or load.concurrency)):
                group.create_task(self._user(may_start))

    async def _user(self, may_start: Callable[[], bool]) -> None:
        while may_start():
            await self._one(time.perf_counter())

    async def _open_loop(self, started_s: float) -> None:
        arrivals_s = poisson_arrivals_s(
            self._load.rate_per_s, self._load.duration_s, self._load.seed
        )
        async with asyncio.TaskGroup() as group:
            for arrival_s in arrivals_s[: self._load.requests or None]:
                await asyncio.sleep(started_s + arrival_s - time.perf_counter())
                # Latency counts from when the user wanted the answer, not from when the generator
                # got to it.
                group.create_task(self._one(started_s + arrival_s))
            if not self._load.requests:
                await asyncio.sleep(started_s + self._load.duration_s - time.perf_counter())
            self._close_window(started_s)

    async def _one(self, started_s: float) -> None:
        exchange = Exchange(started_s)
        self._result.exchanges.append(exchange)
        await self._pool.perform(self._maker.next(), exchange)


async def one_exchange(maker: RequestMaker, timeout_s: float) -> Exchange:
    """A single request on a connection of its own, for warming up and for counting a prompt's
    tokens.
    """
    result = await Generator(maker, Load(concurrency=1, requests=1, timeout_s=timeout_s)).run()
    exchange = result.exchanges[0]
    if exchange.error is not None:
        raise SystemFailed(f"http://{maker.host}:{maker.port} does not answer: {exchange.error}")
    return exchange
