"""The metrics of a process; `order_metrics.py` has those of the order of work."""

from __future__ import annotations

import asyncio
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from serve_app import __version__, timings
from serve_app.clock import SYSTEM, Clock
from serve_app.contract import NotResumed, Reason, State
from serve_app.loops import Loops

_TEXTS = {
    "hermes_build_info": "Always 1; the version of this process's code.",
    "hermes_requests_admitted": "Requests accepted: written to the journal and the queue.",
    "hermes_requests_refused": "Requests refused before acceptance.",
    "hermes_ignored_fields": "Unknown fields in requests, which were ignored (see "
    "x-hermes-ignored).",
    "hermes_requests_ended": "Requests that ended.",
    "hermes_requests_not_resumed": "Requests that failed because no engine could resume an answer "
    "that a client had begun.",
    "hermes_attempts": "Attempts sent to workers: the `first` of a request, or a `retry` after one "
    "was lost.",
    "hermes_calls": "Calls to workers: to the replica that holds the session's prefix cache "
    "(`home`), or to another one because that was full (`overflow`).",
    "hermes_queue_wait_time_seconds": "Time from a request's acceptance to the start of its first "
    "attempt.",
    "hermes_batch_processing_time_seconds": "Time that an attempt spends in the engine's running "
    "batch.",
    "hermes_time_to_first_token_seconds": "Time from a request's acceptance to its first output "
    "token.",
    "hermes_end_to_end_time_seconds": "Time from a request's acceptance to its end.",
    "hermes_loop_restarts": "Background tasks of the process that ended unexpectedly and were "
    "restarted.",
    "hermes_event_loop_blocks": "Times that one step blocked a worker's event loop for longer than "
    "workers.max_event_loop_block_s.",
    "hermes_engines_ready": "Engines that this ingress can send work to (0 in a worker's process).",
    "hermes_in_flight_requests": "Attempts that this worker has begun and not ended (0 in an "
    "ingress's process).",
    "hermes_engine_slots": "Sequences that this worker's engine may run at a time (0 in an "
    "ingress's process).",
    "hermes_journal_buffer_bytes": "Memory of the journal entries that this worker keeps until "
    "their requests end, to append them again if Redis loses them (0 in an ingress's process).",
    "hermes_event_loop_lag_seconds": "How much later than due the process's asyncio event loop "
    "runs a timer.",
    "hermes_thread_cpu_seconds": "CPU time that a thread of the process has used.",
    "hermes_thread_cpu_wait_seconds": "Time that a runnable thread has waited for a free CPU "
    "(Linux).",
    "hermes_threads": "Python threads of this process.",
}


class Maker:
    """Makes the metrics of a registry, each with its text."""

    def __init__(self, registry: CollectorRegistry, texts: Mapping[str, str]) -> None:
        self._registry, self._texts = registry, texts

    def counter(self, name: str, *labels: str) -> Counter:
        return Counter(name, self._texts[name], labels, registry=self._registry)

    def gauge(self, name: str, *labels: str) -> Gauge:
        return Gauge(name, self._texts[name], labels, registry=self._registry)

    def histogram(self, name: str, buckets: Sequence[float], *labels: str) -> Histogram:
        text = self._texts[name]
        return Histogram(name, text, labels, registry=self._registry, buckets=buckets)


_WAIT_S = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
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


class Telemetry:
    """The metrics of one process, in a registry of their own beside the default one (which holds
    vLLM's and the process's).
    """

    def __init__(self) -> None:
        # They would be a series for each series, and nobody asks for them.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry(auto_describe=True)
        make = Maker(self.registry, _TEXTS)
        self._admitted = make.counter("hermes_requests_admitted", "class")
        self._refused = make.counter("hermes_requests_refused", "reason")
        self._ignored = make.counter("hermes_ignored_fields")
        self._ended = make.counter("hermes_requests_ended", "class", "state", "reason")
        self._lost = make.counter("hermes_requests_not_resumed", "cause")
        self._attempts = make.counter("hermes_attempts", "kind")
        self._calls = make.counter("hermes_calls", "placed")
        self._called = {True: 0, False: 0}
        self._queue_wait = make.histogram("hermes_queue_wait_time_seconds", _WAIT_S, "class")
        self._processing = make.histogram("hermes_batch_processing_time_seconds", _WAIT_S, "class")
        self._ttft = make.histogram("hermes_time_to_first_token_seconds", _WAIT_S, "class")
        self._end_to_end = make.histogram("hermes_end_to_end_time_seconds", _WAIT_S, "class")
        self.tokens = TokenTelemetry(self.registry)
        self._loop_restarts = make.counter("hermes_loop_restarts", "loop")
        self._loop_held = make.counter("hermes_event_loop_blocks")
        self._engines_ready = make.gauge("hermes_engines_ready")
        self._in_flight = make.gauge("hermes_in_flight_requests")
        self._slots = make.gauge("hermes_engine_slots")
        self._journal_kept = make.gauge("hermes_journal_buffer_bytes")
        make.gauge("hermes_build_info", "version").labels(__version__).set(1)
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """Prometheus sees no increase to the first value of a series."""
        for cause in NotResumed:
            self._lost.labels(str(cause))
        for reason in Reason:
            self._refused.labels(str(reason))
        for kind in ("first", "retry"):
            self._attempts.labels(kind)
        self.called({})

    # -- every process ----------------------------------------------------------------------------

    def loop_kept(self, name: str) -> None:
        """A background loop starts, and its series at 0."""
        self._loop_restarts.labels(name)

    def loop_restarted(self, name: str) -> None:
        self._loop_restarts.labels(name).inc()

    # -- ingress ----------------------------------------------------------------------------------

    def admitted(self, request_class: str) -> None:
        self._admitted.labels(request_class).inc()

    def refused(self, reason: Reason) -> None:
        self._refused.labels(str(reason)).inc()

    def ignored(self, fields: int) -> None:
        self._ignored.inc(fields)

    def claimed(self, request_class: str, waited_s: float) -> None:
        self._queue_wait.labels(request_class).observe(max(0.0, waited_s))

    def attempted(self, epoch: int) -> None:
        self._attempts.labels("first" if epoch == 1 else "retry").inc()

    def called(self, calls: Mapping[bool, int]) -> None:
        """How many calls there were so far, at home and elsewhere."""
        for home, placed in ((True, "home"), (False, "overflow")):
            now = calls.get(home, 0)
            self._calls.labels(placed).inc(now - self._called[home])
            self._called[home] = now

    def engines_ready(self, engines: int) -> None:
        self._engines_ready.set(engines)

    # -- worker -----------------------------------------------------------------------------------

    def working_on(self, requests: int) -> None:
        self._in_flight.set(requests)

    def engine_slots(self, sequences: int) -> None:
        self._slots.set(sequences)

    def journal_kept(self, kept_bytes: Callable[[], int]) -> None:
        """Where a thread may ask how much memory the kept entries take."""
        self._journal_kept.set_function(kept_bytes)

    def loop_held(self) -> None:
        self._loop_held.inc()

    def first_token(self, request_class: str, since_admission_s: float) -> None:
        self._ttft.labels(request_class).observe(max(0.0, since_admission_s))

    def processed(self, request_class: str, processing_s: float, since_admission_s: float) -> None:
        self._processing.labels(request_class).observe(max(0.0, processing_s))
        self._end_to_end.labels(request_class).observe(max(0.0, since_admission_s))

    def ended(self, request_class: str, state: State, reason: Reason | None) -> None:
        self._ended.labels(request_class, str(state), str(reason or "")).inc()

    def lost(self, cause: NotResumed) -> None:
        self._lost.labels(str(cause)).inc()

    # -- pages ------------------------------------------------------------------------------------

    def page(self) -> bytes:
        """This process's metrics, including vLLM's and the process's own. Takes tens of
        milliseconds: call it in a thread.
        """
        return generate_latest(self.registry) + generate_latest(REGISTRY)


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
        make = Maker(registry, _TEXTS)
        self._lag = make.histogram("hermes_event_loop_lag_seconds", _LAGS_S)
        self._computed = make.counter("hermes_thread_cpu_seconds", "thread")
        self._starved = make.counter("hermes_thread_cpu_wait_seconds", "thread")
        self._threads = make.gauge("hermes_threads")
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
