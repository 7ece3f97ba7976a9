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
    """One engine. Steps that differ in their contexts alone are made at once; an arrival cuts them
    short at the end of the step in which it comes.
    """

    def __init__(self, name: str, parameters: EngineParameters) -> None:
        self.name = name
        self.model = EngineModel(parameters)
        self.samples = Samples()
        self.gaps: list[tuple[float, int]] = []
        """Times between two tokens of a sequence, and how many of each there were."""
        self.gone: dict[str, float] = {}
        """The counters of models that a fault ended."""
        self._loop = asyncio.get_running_loop()
        self._calls: dict[Sequence, tuple[asyncio.Future[None], Callable[[], None]]] = {}
        self._step: Step | None = None
        self._steps = 0
        self._began_s = 0.0
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
        if self._step is None:
            self._begin()
        elif self._step.repeats > 1 and not self._hangs:
            self._cut_short(self._step)
        await future

    def stop(self) -> None:
        """A fault: the engine's process ends, and all of its work with it."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        for name, value in self.model.metrics().items():
            if name.endswith("_total"):
                self.gone[name] = self.gone.get(name, 0.0) + value
        self.model = EngineModel(self.model.parameters)
        self._step = None
        calls, self._calls = self._calls, {}
        for future, _ in calls.values():
            future.set_exception(EngineStopped())

    def hang(self) -> None:
        """A fault: no step ends any more; what arrives is taken and waits, until `stop`."""
        self._hangs = True
        if self._timer is not None:
            self._timer.cancel()

    def restart(self) -> None:
        """The engine is back, with an empty cache."""
        self._stopped = self._hangs = False

    def produced(self, sequence: Sequence) -> int:
        """How many tokens a sequence has now, in the middle of steps that are made at once, too."""
        step = self._step
        if step is None or sequence not in step.decoding:
            return sequence.produced
        return sequence.produced + step.steps_by(self._loop.time() - self._began_s) - 1

    def settle(self) -> None:
        """The simulation stops in the middle of this engine's steps: count those that are over."""
        step, elapsed_s = self._step, self._loop.time() - self._began_s
        if step is None or step.repeats == 1 or self._hangs:
            return
        steps = step.steps_by(elapsed_s) - 1
        if steps:
            for sequence in self.model.complete(step, steps):
                self._end_call(sequence)
        self.hang()

    def _end_call(self, sequence: Sequence) -> None:
        future, _ = self._calls.pop(sequence)
        if not future.done():
            future.set_result(None)

    def _cut_short(self, step: Step) -> None:
        steps = step.steps_by(self._loop.time() - self._began_s)
        if steps < self._steps:
            assert self._timer is not None
            self._timer.cancel()
            self._plan(step, steps)

    def _plan(self, step: Step, steps: int) -> None:
        self._steps = steps
        self._timer = self._loop.call_at(self._began_s + step.duration_s(steps), self._end)

    def _begin(self) -> None:
        self._step = self.model.schedule()
        self._began_s = self._loop.time()
        if self._step is not None and not self._hangs:
            self._plan(self._step, self._step.repeats)

    def _end(self) -> None:
        step, steps = self._step, self._steps
        assert step is not None
        ended = self.model.complete(step, steps)
        if step.decoding:
            gap_s = step.duration_s(steps) / steps
            self.gaps.append((gap_s, steps * len(step.decoding)))
        for sequence, _ in step.chunks:
            if sequence.produced == 1 and sequence.missing == 1:
                self._calls[sequence][1]()
        self.samples.take(self._loop.time(), self.model)
        for sequence in ended:
            self._end_call(sequence)
        self._begin()
