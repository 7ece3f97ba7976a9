"""One batcher in front of the model of an engine, in virtual time: no noise, and the same every
time. Pure.
"""

import heapq
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from workers.engine_model.model import EngineModel
from workers.engine_model.parameters import EngineParameters
from workers.engine_model.sequence import Sequence as EngineSequence

from ..measurement import Latency
from ..stats import poisson_arrivals_s
from .job import Job, mix
from .occupancy import Occupancy
from .row import BatchRow
from .run import Pressure
from .specification import Specification

_NAN = float("nan")


class _Coming(NamedTuple):
    """Something that happens at a time of its own: a user comes, a request reaches the engine, or
    (with neither) the batcher wants to be asked.
    """

    at_s: float
    number: int
    job: Job | None = None
    sequence: EngineSequence | None = None


class VirtualRun:
    """The same load as `Run`, for its window. What has not ended by then is unfinished."""

    def __init__(
        self,
        specification: Specification,
        parameters: EngineParameters,
        pressure: Pressure,
        prompt_tokens: int,
        max_tokens: int,
    ) -> None:
        self._name = specification.name
        self._batcher = specification.make(pressure.users or None)
        self._model = EngineModel(parameters)
        self._request_s = parameters.timing.request_ms / 1e3
        self._pressure = pressure
        self._prompt_tokens = prompt_tokens
        self._demands = mix(pressure.seed, max_tokens)
        self._now_s = 0.0
        self._coming: list[_Coming] = []
        self._numbered = self._turns = 0
        self._jobs: list[Job] = []
        self._at_engine: dict[EngineSequence, Job] = {}
        self._ended_s: dict[Job, float] = {}
        self._in_flight = 0
        self._running = Occupancy(0.0)
        self._slots = Occupancy(0.0)
        self._most_waiting = self._most_running = self._most_kv = 0.0

    def measure(self, round_number: int) -> BatchRow:
        """Run to the end of the window."""
        pressure = self._pressure
        if pressure.rate_per_s:
            seed = zlib.crc32(pressure.seed.encode())
            for at_s in poisson_arrivals_s(pressure.rate_per_s, pressure.window_s, seed):
                self._submit(at_s)
        for _ in range(pressure.users):
            self._submit(0.0)
        while self._now_s < pressure.window_s and self._go_on():
            pass
        self._now_s = max(self._now_s, pressure.window_s)
        return self._row(round_number)

    def _go_on(self) -> bool:
        """What comes now, and then one step of the engine, or the time until something comes."""
        self._happen()
        step = self._model.schedule()
        if step is None:
            if self._coming:
                self._now_s = self._coming[0].at_s
            return bool(self._coming)
        self._observe()
        steps = step.repeats
        if self._coming:
            steps = step.steps_by(self._coming[0].at_s - self._now_s)
        self._now_s += step.duration_s(steps)
        self._happen()
        for sequence in self._model.complete(step, steps):
            self._end(self._at_engine.pop(sequence))
        return True

    def _happen(self) -> None:
        """Everything that has come by now, in its order."""
        while self._coming and self._coming[0].at_s <= self._now_s:
            one = heapq.heappop(self._coming)
            if one.sequence is not None:
                self._model.add(one.sequence)
                continue
            if one.job is not None:
                self._batcher.add(one.job)
            self._turn(one.at_s)

    def _turn(self, at_s: float) -> None:
        started = self._batcher.next(at_s)
        self._turns += 1
        for job in started:
            sequence = EngineSequence(
                self._prompt_tokens, job.output_tokens, base=-(job.number + 1) << 20
            )
            self._at_engine[sequence] = job
            self._push(at_s + self._request_s, sequence=sequence)
        self._in_flight += len(started)
        self._running.note(at_s, self._in_flight)
        self._slots.note(at_s, self._batcher.slots or 0)
        if (wake_s := self._batcher.wake_s()) is not None:
            self._push(max(wake_s, at_s))

    def _end(self, job: Job) -> None:
        self._ended_s[job] = self._now_s
        self._in_flight -= 1
        self._batcher.ended(job)
        self._turn(self._now_s)
        if self._pressure.users:
            self._submit(self._now_s)

    def _submit(self, at_s: float) -> None:
        demand = next(self._demands)
        job = Job(
            len(self._jobs), at_s, self._prompt_tokens, demand.output_tokens, demand.interactive
        )
        self._jobs.append(job)
        self._push(at_s, job=job)

    def _push(
        self, at_s: float, job: Job | None = None, sequence: EngineSequence | None = None
    ) -> None:
        self._numbered += 1
        heapq.heappush(self._coming, _Coming(at_s, self._numbered, job, sequence))

    def _observe(self) -> None:
        model = self._model
        self._most_running = max(self._most_running, len(model.running))
        self._most_waiting = max(self._most_waiting, model.waiting)
        self._most_kv = max(self._most_kv, model.kv.used / model.kv.total)

    def _row(self, round_number: int) -> BatchRow:
        jobs = [job for job in self._jobs if job.arrived_s <= self._now_s]
        tokens = self._model.metrics()["vllm:generation_tokens_total"]
        tokens_per_s = tokens / self._now_s
        mean_tokens = sum(job.output_tokens for job in jobs) / max(1, len(jobs))
        return BatchRow(
            batcher=self._name,
            load=self._pressure.name,
            round=round_number,
            requests=len(jobs),
            unfinished=len(jobs) - len(self._ended_s),
            errors=0,
            error_kinds={},
            requests_per_s=round(tokens_per_s / max(1.0, mean_tokens), 3),
            tokens_per_s=round(tokens_per_s, 2),
            end_to_end=self._latency(jobs),
            interactive=self._latency([job for job in jobs if job.interactive]),
            batch=self._latency([job for job in jobs if not job.interactive]),
            in_flight=round(self._running.mean(self._now_s), 3),
            slots=round(self._slots.mean(self._now_s), 3),
            engine_running=self._most_running,
            engine_waiting=self._most_waiting,
            kv_used=round(self._most_kv, 4),
            rss_mib=_NAN,
            cores=_NAN,
            loop_share=_NAN,
            turns_per_s=round(self._turns / self._now_s, 1),
            turn_us=_NAN,
        )

    def _latency(self, jobs: Sequence[Job]) -> Latency:
        ends = ((job, self._ended_s.get(job, self._now_s)) for job in jobs)
        return Latency.of_seconds([end_s - job.arrived_s for job, end_s in ends])
