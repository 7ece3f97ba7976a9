"""Who is measured when: the batchers take turns at every load, so that noise meets all alike."""

import asyncio
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from .. import interrupts
from ..errors import SystemFailed
from ..load import one_exchange
from ..options import Options
from ..processes import members, read_processes
from ..prompts import RequestMaker, Shape
from ..stats import median
from ..systems import System
from .engine_gauges import EngineGauges
from .row import BatchRow, describe
from .run import Pressure, Run
from .server import Server
from .specification import Specification, parse

_CAPACITY_RUNS = 3
_SETTLE_TOKENS = 2
_SETTLE_TRIES = 100


def pressures(options: Options, capacity_per_s: float = 0.0) -> list[Pressure]:
    """The loads that ``options`` ask for; those in percent are of ``capacity_per_s``."""
    if not capacity_per_s:
        return [_pressure(options, str(users), users, 0.0) for users in options.concurrency]
    return [
        _pressure(options, f"{percent} %", 0, capacity_per_s * percent / 100)
        for percent in options.load_percent
    ]


def _pressure(options: Options, name: str, users: int, rate_per_s: float) -> Pressure:
    seed = f"{options.seed}/{name}"
    return Pressure(name, users, rate_per_s, options.duration_s, options.timeout_s, seed)


class BatchRounds:
    """Measures the batchers of ``options`` against one endpoint."""

    def __init__(self, options: Options, system: System, shape: Shape) -> None:
        self._options = options
        self._system = system
        self._shape = shape
        self._server = Server(members(read_processes(), system.scope))
        self.capacity_per_s = 0.0
        """Requests/s of the continuous batcher, of which ``--load-percent`` is a part."""

    def take_turns(self, report: Callable[[BatchRow], None]) -> list[BatchRow]:
        """Measure everything: for every load in every round one run of every batcher."""
        rows: list[BatchRow] = []
        if self._options.load_percent:
            self.capacity_per_s = self._measure_capacity()
        for pressure in pressures(self._options, self.capacity_per_s):
            for number in range(1, self._options.rounds + 1):
                for specification in self._options.batching:
                    rows.append(self._measure(specification, pressure, number))
                    report(rows[-1])
        return rows

    def _measure_capacity(self) -> float:
        (continuous,) = parse("continuous")
        users = max(self._options.concurrency)
        pressure = _pressure(self._options, "capacity", users, 0.0)
        runs = [
            self._measure(continuous, pressure, number) for number in range(1, _CAPACITY_RUNS + 1)
        ]
        capacity_per_s = median([row.requests_per_s for row in runs])
        if not capacity_per_s:
            raise SystemFailed(f"{self._system.name} has no capacity: {runs[-1].error_kinds}")
        return capacity_per_s

    def _measure(self, specification: Specification, pressure: Pressure, number: int) -> BatchRow:
        seed = f"{pressure.seed}/{number}"
        # The same lengths and arrivals for every batcher of a round, but no prompt twice: the
        # prefix cache would answer.
        maker = self._maker(f"{seed}/{specification.name}")
        drive = Run(
            specification,
            maker,
            replace(pressure, seed=seed),
            self._options.prompt_tokens,
            self._server,
        )
        return interrupts.run(self._run(specification, pressure, number, drive))

    async def _run(
        self, specification: Specification, pressure: Pressure, number: int, drive: Run
    ) -> BatchRow:
        gauges = EngineGauges(self._system.url)
        watching = asyncio.create_task(gauges.watch())
        try:
            ran = await drive.measure()
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
        row = describe(specification.name, pressure, number, ran, gauges, self._server.rss_bytes())
        if any(one.broken_off for one in ran.served):
            await self._settle()
        return row

    async def _settle(self) -> None:
        """Return when the engine has dropped what was broken off; it must not cost the next run."""
        maker = self._maker("settle", max_tokens=_SETTLE_TOKENS)
        for _ in range(_SETTLE_TRIES):
            await one_exchange(maker, self._options.timeout_s)
            gauges = EngineGauges(self._system.url)
            if not await gauges.read() or gauges.most_running + gauges.most_waiting == 0:
                return
        raise SystemFailed(f"{self._system.name} goes on with requests that were broken off")

    def _maker(self, seed: str, max_tokens: int = 0) -> RequestMaker:
        shape = replace(self._shape, max_tokens=max_tokens or self._shape.max_tokens)
        number = zlib.crc32(seed.encode())
        return RequestMaker(self._system.url, self._options.api_key, shape, number)
