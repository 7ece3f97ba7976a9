"""The engine model, turned by the virtual event loop."""

import asyncio
from collections.abc import Callable

from scripts.simulation.engine_model import EngineModel, Sequence, Step
from scripts.simulation.engines import EngineParameters
from serve_app.contract import EngineReport


class VirtualEngine:
    """One engine, which makes step after step while it has sequences."""

    def __init__(self, name: str, parameters: EngineParameters) -> None:
        self.name = name
        self.model = EngineModel(parameters)
        self.samples: list[tuple[float, float, int, int]] = []
        """After each step: seconds, share of the KV cache used, sequences running and waiting."""
        self._loop = asyncio.get_running_loop()
        self._calls: dict[Sequence, tuple[asyncio.Future[None], Callable[[], None]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def metrics(self) -> dict[str, float]:
        return self.model.metrics()

    def report(self) -> EngineReport:
        """What it says of itself, as the worker's lease would carry it."""
        return self.model.report(self.name)

    async def run(self, sequence: Sequence, on_first_token: Callable[[], None]) -> None:
        """Generate all tokens of a sequence.

        Raises:
            ValueError: the sequence can never fit.
        """
        await asyncio.sleep(self.model.parameters.timing.request_ms / 1e3)
        self.model.add(sequence)
        future: asyncio.Future[None] = self._loop.create_future()
        self._calls[sequence] = future, on_first_token
        if self._timer is None:
            self._begin()
        await future

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _begin(self) -> None:
        step = self.model.schedule()
        if step is not None:
            self._timer = self._loop.call_later(step.duration_s, self._end, step)

    def _end(self, step: Step) -> None:
        self._timer = None
        ended = self.model.complete(step)
        for sequence, _ in step.chunks:
            if sequence.produced == 1 and sequence.missing == 1:
                self._calls[sequence][1]()
        kv, running, waiting = self.model.kv, len(self.model.running), self.model.waiting
        self.samples.append((self._loop.time(), kv.used / kv.total, running, waiting))
        for sequence in ended:
            future, _ = self._calls.pop(sequence)
            if not future.done():
                future.set_result(None)
        self._begin()
