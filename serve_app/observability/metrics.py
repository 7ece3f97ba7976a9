"""The metrics of a process; `ingress_metrics.py` has those of an ingress alone."""

from __future__ import annotations

import asyncio
import threading
import tomllib
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Summary,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from serve_app import __version__, timings
from serve_app.clock import SYSTEM, Clock
from serve_app.contract import NotResumed, Reason
from serve_app.loops import Loops

_FILE = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text())
_KINDS = {"counter": Counter, "gauge": Gauge, "summary": Summary}


class Metrics:
    """Metrics of `metrics.toml` by their names: those of one of its groups, in a registry."""

    def __init__(self, group: str, registry: CollectorRegistry) -> None:
        self._made = {name: _made(name, facts, registry) for name, facts in _FILE[group].items()}

    def of(self, name: str, *labels: str) -> Any:
        """The metric, or its series with these labels."""
        return self._made[name].labels(*labels) if labels else self._made[name]

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        self.of(name, *labels).inc(by)

    def observe(self, name: str, value: float, *labels: str) -> None:
        """A time between two machines' clocks may be negative, and counts as 0."""
        self.of(name, *labels).observe(max(0.0, value))

    def set(self, name: str, value: float, *labels: str) -> None:
        self.of(name, *labels).set(value)


def _made(name: str, facts: Mapping[str, Any], registry: CollectorRegistry) -> Any:
    given = {"labelnames": facts.get("labels", ()), "registry": registry}
    if "buckets" in facts:
        buckets = _FILE["buckets"][facts["buckets"]]
        return Histogram(name, facts["text"], buckets=buckets, **given)
    return _KINDS[facts["kind"]](name, facts["text"], **given)


_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)


class TokenTelemetry(Collector):
    """What is counted for every token: plain numbers, which become metrics when a page is made.
    prometheus_client's own counters take locks and walk their buckets at each call, which was a
    twelfth of the CPU time that a worker spends on a token. One thread counts.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._prompt = self._output = self._recomputed = 0
        self._gaps = [0] * (len(_BOUNDS_S) + 1)
        self._gaps_s = 0.0
        registry.register(self)

    def prompt(self, tokens: int) -> None:
        self._prompt += tokens

    def output(self, tokens: int, since_last_s: float | None) -> None:
        """An engine output arrived. `since_last_s`: None for a request's first."""
        self._output += tokens
        if since_last_s is not None:
            self._gaps[bisect_left(_BOUNDS_S, since_last_s)] += 1
            self._gaps_s += since_last_s

    def recomputed(self, tokens: int) -> None:
        """Tokens that a request had before its engine died have to be computed again."""
        self._recomputed += tokens

    def collect(self) -> Iterator[Metric]:
        """The metrics, for prometheus_client."""
        tokens = CounterMetricFamily(
            "hermes_tokens",
            "Tokens that engines have read (`prompt`) and generated (`output`).",
            labels=["kind"],
        )
        tokens.add_metric(["prompt"], self._prompt)
        tokens.add_metric(["output"], self._output)
        yield tokens
        yield CounterMetricFamily(
            "hermes_recomputed_tokens",
            "Prompt and output tokens that were computed again after an engine or worker died.",
            value=self._recomputed,
        )
        upper = [*map(floatToGoString, _BOUNDS_S), "+Inf"]
        yield HistogramMetricFamily(
            "hermes_inter_token_time_seconds",
            "Time between two engine outputs of a request; one may hold several tokens.",
            buckets=list(zip(upper, accumulate(self._gaps), strict=True)),
            sum_value=self._gaps_s,
        )


class Telemetry(Metrics):
    """The metrics of one process, in a registry of their own beside the default one (which holds
    vLLM's and the process's).
    """

    def __init__(self) -> None:
        # They would be a series for each series, and nobody asks for them.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry(auto_describe=True)
        super().__init__("process", self.registry)
        self.tokens = TokenTelemetry(self.registry)
        self._called = {True: 0, False: 0}
        self.set("hermes_build_info", 1, __version__)
        self.set("hermes_policy_valid", 1)  # an ingress knows better
        # Prometheus sees no increase to the first value of a series.
        for cause in NotResumed:
            self.of("hermes_requests_not_resumed", cause)
        for reason in Reason:
            self.of("hermes_requests_refused", reason)
        for kind in ("first", "retry"):
            self.of("hermes_attempts", kind)
        self.called({})

    def called(self, calls: Mapping[bool, int]) -> None:
        """How many calls of workers there were so far, at home and elsewhere."""
        for home, placed in ((True, "home"), (False, "overflow")):
            now = calls.get(home, 0)
            self.count("hermes_calls", placed, by=now - self._called[home])
            self._called[home] = now

    def page(self) -> bytes:
        """This process's metrics, including vLLM's and the process's own. Takes tens of
        milliseconds: call it in a thread.
        """
        return generate_latest(self.registry) + generate_latest(REGISTRY)


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
        self._metrics = Metrics("activity", registry)
        self._seen_ns: dict[int, tuple[int, int]] = {}

    async def start(self) -> None:
        """Sample the running loop, in the thread that runs it."""
        loop_thread = threading.get_native_id()
        self._loops.keep("activity", partial(self._beat, loop_thread))

    async def _beat(self, loop_thread: int) -> None:
        while True:
            due_s = self._clock.monotonic_s() + timings.ACTIVITY_LOOK_S
            await asyncio.sleep(timings.ACTIVITY_LOOK_S)
            late_s = self._clock.monotonic_s() - due_s
            self._metrics.observe("hermes_event_loop_lag_seconds", late_s)
            self._look(loop_thread)

    def _look(self, loop_thread: int) -> None:
        threads = threading.enumerate()
        self._metrics.set("hermes_threads", len(threads))
        names = {one.native_id: _NAMES[one.name] for one in threads if one.name in _NAMES}
        for thread, name in {**names, loop_thread: _LOOP}.items():
            if thread is None or (now_ns := _scheduled_ns(thread)) is None:
                continue
            before_ns = self._seen_ns.get(thread, (0, 0))
            computed_s, starved_s = (max(0, now_ns[i] - before_ns[i]) / 1e9 for i in (0, 1))
            self._metrics.count("hermes_thread_cpu_seconds", name, by=computed_s)
            self._metrics.count("hermes_thread_cpu_wait_seconds", name, by=starved_s)
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
