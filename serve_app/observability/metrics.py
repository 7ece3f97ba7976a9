"""Every metric, and the pages that show them. Owns prometheus_client.

`/metrics` on any ingress replica is one page for the whole application: it merges the snapshots
that every process writes to Redis, and labels each sample with its `replica`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from serve_app import __version__
from serve_app.contract import NotResumed, Reason, State
from serve_app.observability.token_metrics import TokenTelemetry

_WAIT_S = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)


def _losses(counter: Callable[..., Counter]) -> Counter:
    """Begins with zeros: Prometheus sees no increase to the first value of a series."""
    text = "Requests that failed because no engine could resume an answer that a client had begun."
    losses = counter("hermes_requests_not_resumed", text, ["cause"])
    for cause in NotResumed:
        losses.labels(str(cause))
    return losses


class Telemetry:
    """The metrics of one process, in a registry of their own beside the default one (which holds
    vLLM's and the process's).
    """

    def __init__(self) -> None:
        # They would be a series for each series, and nobody asks for them.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry(auto_describe=True)
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        duration = partial(Histogram, registry=self.registry, buckets=_WAIT_S)
        self._admitted = counter(
            "hermes_requests_admitted",
            "Requests accepted: written to the journal and the queue.",
            ["class"],
        )
        self._refused = counter(
            "hermes_requests_refused", "Requests refused before acceptance.", ["reason"]
        )
        self._ignored = counter(
            "hermes_ignored_fields",
            "Unknown fields in requests, which were ignored (see x-hermes-ignored).",
        )
        self._ended = counter(
            "hermes_requests_ended", "Requests that ended.", ["class", "state", "reason"]
        )
        self._attempts = counter(
            "hermes_attempts",
            "Attempts sent to workers: the `first` of a request, or a `retry` after one was lost.",
            ["kind"],
        )
        self._calls = counter(
            "hermes_calls",
            "Calls to workers: to the replica that holds the session's prefix cache (`home`), or "
            "to another one because that was full (`overflow`).",
            ["placed"],
        )
        self._lost = _losses(counter)
        self._queue_wait = duration(
            "hermes_queue_wait_time_seconds",
            "Time from a request's acceptance to the start of its first attempt.",
            ["class"],
        )
        self._processing = duration(
            "hermes_batch_processing_time_seconds",
            "Time that an attempt spends in the engine's running batch.",
            ["class"],
        )
        self._ttft = duration(
            "hermes_time_to_first_token_seconds",
            "Time from a request's acceptance to its first output token.",
            ["class"],
        )
        self._end_to_end = duration(
            "hermes_end_to_end_time_seconds",
            "Time from a request's acceptance to its end.",
            ["class"],
        )
        self.tokens = TokenTelemetry(self.registry)
        self._loop_restarts = counter(
            "hermes_loop_restarts",
            "Background tasks of the process that ended unexpectedly and were restarted.",
            ["loop"],
        )
        self._loop_held = counter(
            "hermes_event_loop_blocks",
            "Times that one step blocked a worker's event loop for longer than "
            "workers.max_event_loop_block_s.",
        )
        self._called = {True: 0, False: 0}
        self._make_gauges(gauge)
        self._prepare_series()

    def _make_gauges(self, gauge: Callable[..., Gauge]) -> None:
        self._engines_ready = gauge(
            "hermes_engines_ready",
            "Engines that this ingress can send work to (0 in a worker's process).",
        )
        self._in_flight = gauge(
            "hermes_in_flight_requests",
            "Attempts that this worker has begun and not ended (0 in an ingress's process).",
        )
        self._slots = gauge(
            "hermes_engine_slots",
            "Sequences that this worker's engine may run at a time (0 in an ingress's process).",
        )
        self._journal_kept = gauge(
            "hermes_journal_buffer_bytes",
            "Memory of the journal entries that this worker keeps until their requests end, to "
            "append them again if Redis loses them (0 in an ingress's process).",
        )

    def _prepare_series(self) -> None:
        Gauge(
            "hermes_build_info",
            "Always 1; the version of this process's code.",
            ["version"],
            registry=self.registry,
        ).labels(__version__).set(1)
        for reason in Reason:  # start the series at 0, see `loop_kept`
            self._refused.labels(str(reason))
        for kind in ("first", "retry"):
            self._attempts.labels(kind)
        self.called({})

    # -- every process ----------------------------------------------------------------------------

    def loop_kept(self, name: str) -> None:
        """A background loop starts. This creates the series at 0: `increase()` does not see a
        series that first appears at 1.
        """
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
        """An attempt was sent to a worker."""
        self._attempts.labels("first" if epoch == 1 else "retry").inc()

    def called(self, calls: Mapping[bool, int]) -> None:
        """How many calls there were so far, at home and elsewhere."""
        for home, placed in ((True, "home"), (False, "overflow")):
            now = calls.get(home, 0)
            self._calls.labels(placed).inc(now - self._called[home])
            self._called[home] = now

    def engines_ready(self, engines: int) -> None:
        """How many engines this ingress can send work to."""
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
        """A step has blocked the event loop for too long."""
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
