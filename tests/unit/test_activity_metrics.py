"""What a process's loop and threads do is measured by their CPU time and by the loop's lateness."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain, cycle

import pytest
from prometheus_client import CollectorRegistry

from serve_app import timings
from serve_app.clock import SYSTEM, Clock
from serve_app.loops import Loops
from serve_app.observability.metrics import Activity
from tests.waiting import eventually

COMPUTED_S = 0.2


def compute(seconds: float) -> None:
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


@asynccontextmanager
async def sampled(clock: Clock = SYSTEM) -> AsyncIterator[CollectorRegistry]:
    registry = CollectorRegistry()
    loops = Loops()
    await Activity(registry, loops, clock).start()
    try:
        yield registry
    finally:
        await loops.stop()


def cpu_s(registry: CollectorRegistry, thread: str) -> float:
    labels = {"thread": thread}
    return registry.get_sample_value("hermes_thread_cpu_seconds_total", labels) or 0.0


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell")
async def test_a_named_thread_is_counted_under_its_name_and_one_of_a_library_under_none() -> None:
    go = threading.Event()

    def work() -> None:
        compute(COMPUTED_S)
        go.wait()

    threads = [threading.Thread(target=work, name=n) for n in ("validator_0", "library-7")]
    for thread in threads:
        thread.start()
    try:
        async with sampled() as registry:
            await eventually(lambda: cpu_s(registry, "validator") >= COMPUTED_S)
            samples = [s for family in registry.collect() for s in family.samples]
            shown = {s.labels["thread"] for s in samples if "thread" in s.labels}
            assert shown == {"loop", "validator"}
            assert (registry.get_sample_value("hermes_threads") or 0) >= 3
    finally:
        go.set()
        for thread in threads:
            thread.join()


class Held:
    """A clock on which the loop's first timer comes a second late, and all others in time."""

    def __init__(self) -> None:
        due_s = timings.ACTIVITY_LOOK_S
        self._times_s = chain((0.0, due_s + 1.0), cycle((0.0, due_s)))

    def monotonic_s(self) -> float:
        return next(self._times_s)

    def unix_s(self) -> float:
        raise NotImplementedError


async def test_a_loop_that_is_held_is_late() -> None:
    async with sampled(Held()) as registry:
        await eventually(
            lambda: (registry.get_sample_value("hermes_event_loop_lag_seconds_count") or 0) >= 2
        )
        assert registry.get_sample_value("hermes_event_loop_lag_seconds_sum") == 1.0
