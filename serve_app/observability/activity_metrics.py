"""What a process's event loop and threads do: their CPU time, and how late the loop is."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from serve_app import timings
from serve_app.clock import SYSTEM, Clock
from serve_app.loops import Loops

_LAGS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_LOOP = "loop"
_NAMES = {"loop-watch": "loop-watch", "validator_0": "validator"}
"""Threads that are shown, by their Python name. Any other is part of `process_cpu_seconds_total`
only, because libraries start threads of any number and name.
"""


class Activity:
    """Samples the running loop and this process's threads, a few times a second."""

    def __init__(self, registry: CollectorRegistry, loops: Loops, clock: Clock = SYSTEM) -> None:
        self._loops = loops
        self._clock = clock
        self._lag = Histogram(
            "hermes_event_loop_lag_seconds",
            "How much later than due the process's asyncio event loop runs a timer.",
            registry=registry,
            buckets=_LAGS_S,
        )
        self._computed = Counter(
            "hermes_thread_cpu_seconds",
            "CPU time that a thread of the process has used.",
            ["thread"],
            registry=registry,
        )
        self._starved = Counter(
            "hermes_thread_cpu_wait_seconds",
            "Time that a runnable thread has waited for a free CPU (Linux).",
            ["thread"],
            registry=registry,
        )
        self._threads = Gauge(
            "hermes_threads", "Python threads of this process.", registry=registry
        )
        self._seen_ns: dict[int, tuple[int, int]] = {}

    async def start(self) -> None:
        """Sample the running loop, in the thread that runs it."""
        loop_thread = threading.get_native_id()
        self._loops.keep("activity", partial(self._beat, loop_thread))

    async def _beat(self, loop_thread: int) -> None:
        while True:
            due_s = self._clock.monotonic_s() + timings.ACTIVITY_LOOK_S
            await asyncio.sleep(timings.ACTIVITY_LOOK_S)
            self._lag.observe(max(0.0, self._clock.monotonic_s() - due_s))
            self._look(loop_thread)

    def _look(self, loop_thread: int) -> None:
        threads = threading.enumerate()
        self._threads.set(len(threads))
        names = {one.native_id: _NAMES[one.name] for one in threads if one.name in _NAMES}
        for thread, name in {**names, loop_thread: _LOOP}.items():
            if thread is None or (now_ns := _scheduled_ns(thread)) is None:
                continue
            before_ns = self._seen_ns.get(thread, (0, 0))
            self._computed.labels(name).inc(max(0, now_ns[0] - before_ns[0]) / 1e9)
            self._starved.labels(name).inc(max(0, now_ns[1] - before_ns[1]) / 1e9)
            self._seen_ns[thread] = now_ns


def _scheduled_ns(thread: int) -> tuple[int, int] | None:
    """A thread's time on a CPU and its time waiting for one; None if it has ended, or where the
    system does not tell.
    """
    try:
        words = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
        return int(words[0]), int(words[1])
    except (OSError, ValueError, IndexError):
        return None
