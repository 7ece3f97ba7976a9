"""The engine model, turned by the virtual event loop."""

import asyncio
from collections.abc import Callable

from scripts.simulation.engine_model import EngineModel, Sequence, Step
from scripts.simulation.engines import EngineParameters
from serve_app.contract import EngineReport

_SAMPLES = 4096


class EngineStopped(Exception):
    """The engine failed, and what it worked on is lost."""


class Samples:
    """Readings over time: evenly thinned out, so that a run of any length keeps a few thousand."""

    def __init__(self) -> None:
        self.taken: list[tuple[float, float, int, int]] = []
        """Seconds, share of the KV cache used, sequences running, sequences waiting."""
        self._every = 1
        self._count = 0

    def take(self, now_s: float, model: EngineModel) -> None:
        """Read a model."""
        self._count += 1
        if self._count % self._every:
            return
        used = model.kv.used / model.kv.total
        self.taken.append((now_s, used, len(model.running), model.waiting))
        if len(self.taken) >= _SAMPLES:
            self.taken = self.taken[1::2]
            self._every *= 2


class VirtualEngine:
    """One engine, which makes step after step while it has sequences."""

    def __init__(self, name: str, parameters: EngineParameters) -> None:
        self.name = name
        self.model = EngineModel(parameters)
        self.samples = Samples()
        self.gone: dict[str, float] = {}
        """The counters of models that a fault ended."""
        self._loop = asyncio.get_running_loop()
        self._calls: dict[Sequence, tuple[asyncio.Future[None], Callable[[], None]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = self._hangs = False

    def metrics(self) -> dict[str, float]:
        """vLLM's names; counters include what was before a fault."""
        now = self.model.metrics()
        return {name: value + self.gone.get(name, 0.0) for name, value in now.items()}

    def report(self) -> EngineReport:
        """What it says of itself, as the worker's lease would carry it."""
        return self.model.report(self.name)

    async def run(self, sequence: Sequence, on_first_token: Callable[[], None]) -> None:
        """Generate all tokens of a sequence.

        Raises:
            EngineStopped: the engine failed before.
            ValueError: the sequence can never fit.
        """
        await asyncio.sleep(self.model.parameters.timing.request_ms / 1e3)
        if self._stopped:
            raise EngineStopped
        self.model.add(sequence)
        future: asyncio.Future[None] = self._loop.create_future()
        self._calls[sequence] = future, on_first_token
        if self._timer is None and not self._hangs:
            self._begin()
        await future

    def stop(self) -> None:
        """A fault: the engine's process ends, and all of its work with it."""
        self.hang()
        self._stopped = True
        for name, value in self.model.metrics().items():
            if name.endswith("_total"):
                self.gone[name] = self.gone.get(name, 0.0) + value
        self.model = EngineModel(self.model.parameters)
        calls, self._calls = self._calls, {}
        for future, _ in calls.values():
            future.set_exception(EngineStopped())

    def hang(self) -> None:
        """A fault: no step ends any more; what arrives is taken and waits, until `stop`."""
        self._hangs = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def restart(self) -> None:
        """The engine is back, with an empty cache."""
        self._stopped = self._hangs = False

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
        self.samples.take(self._loop.time(), self.model)
        for sequence in ended:
            future, _ = self._calls.pop(sequence)
            if not future.done():
                future.set_result(None)
        self._begin()
