"""`scripts/bench --lateness`: what is traded for fewer writes, in virtual time.

The simulated engine, the attempts and the writer of one worker are real; Redis is a stand-in that
answers after a millisecond, and each output takes the loop the CPU time that one of vLLM's takes.
"""

import asyncio
import statistics
from argparse import Namespace
from typing import Any
from unittest.mock import patch

import msgspec

from scripts.simulation import virtual_time
from serve_app.clock import RedisClock
from serve_app.journal.attempt_log import AttemptLog
from serve_app.journal.entries import AttemptFacts, RequestFacts, RequestLine
from serve_app.observability.metrics import Telemetry
from serve_app.settings import Settings
from workers import simulated_engine
from workers.attempt import Attempt
from workers.journal_writer import JournalWriter

STEPS_MS = (10, 25, 33)
_FIRST_S, _ENDS_S = 1.0, 4.0
"""Counted are the tokens of steps in between."""
_REDIS_S, _OUTPUT_S = 0.001, 30e-6


def measure_lateness(options: Namespace) -> int:
    """Print a row for each step and number of streams; returns the exit status."""
    print("| step | streams | tokens an entry | entries/s | updates/s | late p50 | p90 | max |")
    print("|---|---|---|---|---|---|---|---|")
    for step_ms in STEPS_MS:
        for streams in options.concurrency:
            print(virtual_time.run(row(streams, step_ms)), flush=True)
    return 0


async def row(streams: int, step_ms: float) -> str:
    """A line of the table."""
    late_ms, entries = await lateness(streams, step_ms)
    per_s = entries / (_ENDS_S - _FIRST_S)
    p50, p90 = (statistics.quantiles(late_ms, n=10)[at] for at in (4, 8))
    return (
        f"| {step_ms} ms | {streams} | {len(late_ms) / entries:.2f} | {per_s:,.0f} | "
        f"{per_s / streams:.0f} | {p50:.1f} | {p90:.1f} | {max(late_ms):.1f} ms |"
    )


async def lateness(streams: int, step_ms: float) -> tuple[list[float], int]:
    """Of each token the time in ms from the step that made it until it goes to Redis, and how many
    entries have them.
    """
    loop: Any = asyncio.get_running_loop()
    args = {"kind": "simulated", "args": {"tokens_per_s": 1000 / step_ms}}
    settings = Settings.model_validate({"engine": args})
    redis = _Redis(loop)
    writer = _Writer(settings, redis)
    with patch.object(simulated_engine, "SYSTEM", virtual_time.VirtualClock(loop)):
        engine = simulated_engine.SimulatedEngine(settings)

        def stepped() -> None:
            redis.steps_s.append(loop.time())
            writer.pause.stepped()

        engine.progress.on_step = stepped
        await engine.start()
        await writer.start()
        serving = [asyncio.create_task(_serve(engine, writer, loop, n)) for n in range(streams)]
        await asyncio.sleep(_ENDS_S)
        for task in serving:
            task.cancel()
        await engine.stop()
        await writer.stop()
    return redis.late_ms, redis.entries


async def _serve(
    engine: simulated_engine.SimulatedEngine, writer: JournalWriter, loop: Any, number: int
) -> None:
    attempt = AttemptLog(f"req_{number}", "", 1, b"", "channel", writer._mark)
    attempt.pause = writer.pause
    writer._attempts[attempt.request_id] = attempt
    facts = RequestFacts("standard", "t", "s", "m", True, 1, 2, "channel")
    opened = AttemptFacts("replica-1", "simulated", 1)
    working = _Working(attempt, facts, opened, Telemetry(), RedisClock())
    body = {"stream": True, "max_tokens": 1_000_000, "prompt": str(number)}
    line = RequestLine("POST", "/v1/completions", "", [])
    await engine.serve(attempt.request_id, line, msgspec.json.encode(body), working)


class _Writer(JournalWriter):
    def __init__(self, settings: Settings, redis: Any) -> None:
        super().__init__(settings)
        self._redis = redis

    async def _connect(self) -> Any:
        return self._redis


class _Working(Attempt):
    """An attempt that takes its time."""

    def flush_previous(self) -> None:
        loop: Any = asyncio.get_running_loop()
        loop.work(_OUTPUT_S)
        super().flush_previous()


class _Redis:
    """A connection to nothing, which looks at the outputs in what is appended."""

    usable = True

    def __init__(self, loop: Any) -> None:
        self.steps_s: list[float] = []
        """When the engine made them."""
        self.late_ms: list[float] = []
        self.entries = 0
        self._loop = loop

    def abort(self) -> None:
        """Nothing is open."""

    async def ask(self, commands: list[tuple[Any, ...] | bytes], within_s: float) -> list[bytes]:
        now_s = self._loop.time()
        for command in commands:
            if isinstance(command, bytes) and _FIRST_S <= now_s < _ENDS_S:  # else it is a wake-up
                words = command.split(b"\r\n")
                outputs = msgspec.json.decode(words[words.index(b"o") + 2])
                made_s = [self.steps_s[number - 1] for output in outputs for number in output[2]]
                self.late_ms += [(now_s - one_s) * 1e3 for one_s in made_s]
                self.entries += 1
        await asyncio.sleep(_REDIS_S)
        return [b"1-1"] * len(commands)
