"""More work than the engine can hold, all the time, while its metrics page is read."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

from ..batching.job import Demand, mix
from ..connection import Exchange
from ..pool import ConnectionPool
from ..prompts import RequestMaker
from .engine_page import EnginePage, Reading
from .figures import BacklogRow


class Backlog:
    """``users`` who send their next request as soon as the last one has its answer."""

    def __init__(
        self, maker: RequestMaker, page: EnginePage, users: int, seed: str, timeout_s: float
    ) -> None:
        self._maker = maker
        self._page = page
        self._users = users
        self._pool = ConnectionPool(maker, timeout_s)
        self._demands: Iterator[Demand] = mix(seed, maker.shape.max_tokens)
        self._ended: list[Exchange] = []
        self._under_load = asyncio.Event()

    async def measure(
        self, rounds: int, duration_s: float, settle_s: float = 0.0
    ) -> AsyncIterator[BacklogRow]:
        """One row after another from one load without a pause. The ramp before the first counts for
        none, nor ``settle_s`` after it, in which the service learns how much fits.
        """
        async with self._load():
            await self._under_load.wait()
            await asyncio.sleep(settle_s)
            for number in range(1, rounds + 1):
                readings = await self._page.watch(duration_s)
                yield BacklogRow.of(number, self._users, readings, self._ended_within(readings))

    def _ended_within(self, readings: list[Reading]) -> list[Exchange]:
        first_s, last_s = readings[0].at_s, readings[-1].at_s
        return [one for one in self._ended if first_s < (one.finished_s or 0.0) <= last_s]

    @asynccontextmanager
    async def _load(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._user()) for _ in range(self._users)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks)
            self._pool.close()

    async def _user(self) -> None:
        while True:
            exchange = Exchange(time.perf_counter())
            request = self._maker.next(next(self._demands).output_tokens)
            await self._pool.perform(request, exchange)
            self._ended.append(exchange)
            # As many answers as users: the first requests, which all began at once, are through.
            if len(self._ended) >= self._users:
                self._under_load.set()
