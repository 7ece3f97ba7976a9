"""Every metric, and the pages that show them. Owns prometheus_client.

Two ways to read, never both (docs/operations.md): `/metrics` on any ingress replica is one page for the whole
application, put together from the snapshots that every process leaves in Redis, each sample labelled with its
`replica`; a process's own page (`telemetry.process_port`) is for a scraper that finds every pod.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client import start_http_server as _start_http_server
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from serve_app import __version__
from serve_app.errors import Reason

log = logging.getLogger("hermes.telemetry")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_WAIT_S = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
_TOKEN_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)


class Telemetry:
    """The metrics of one process, in a registry of its own beside the default one (vLLM's and the process's)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self._admitted = Counter(
            "hermes_requests_admitted", "Requests accepted into the journal.", ["class"], registry=r
        )
        self._refused = Counter(
            "hermes_requests_refused", "Requests refused before acceptance.", ["reason"], registry=r
        )
        self._ended = Counter("hermes_requests_ended", "Requests that ended.", ["class", "state", "reason"], registry=r)
        self._attempts = Counter(
            "hermes_attempts", "Attempts dispatched; `retry` past the first.", ["kind"], registry=r
        )
        self._queue_wait = Histogram(
            "hermes_queue_wait_time_seconds", "From the queue entry to its claim.", ["class"],
            registry=r, buckets=_WAIT_S,
        )  # fmt: skip
        self._processing = Histogram(
            "hermes_batch_processing_time_seconds",
            "From the opening of an attempt to its end: the time in the engine's running batch.",
            ["class"], registry=r, buckets=_WAIT_S,
        )  # fmt: skip
        self._ttft = Histogram(
            "hermes_time_to_first_token_seconds", "From admission to the first output.", ["class"],
            registry=r, buckets=_WAIT_S,
        )  # fmt: skip
        self._inter_token = Histogram(
            "hermes_inter_token_time_seconds", "Between two outputs of one request.", registry=r, buckets=_TOKEN_S
        )
        self._end_to_end = Histogram(
            "hermes_end_to_end_time_seconds", "From admission to the end.", ["class"], registry=r, buckets=_WAIT_S
        )
        self._tokens = Counter("hermes_tokens", "Tokens read (prompt) and written (output).", ["kind"], registry=r)
        self._loop_restarts = Counter(
            "hermes_loop_restarts", "Background loops that ended by themselves and were started again.", ["loop"],
            registry=r,
        )  # fmt: skip
        self._engines_ready = Gauge(
            "hermes_engines_ready", "Engines that this ingress can send work to (0 in a worker's process).", registry=r
        )
        self._redis_forgets = Gauge(
            "hermes_redis_forgets", "1 if Redis lost accepted requests at its last restart (0 in a worker's process).",
            registry=r,
        )  # fmt: skip
        self._in_flight = Gauge("hermes_in_flight_requests", "Requests that this replica works on.", registry=r)
        Gauge("hermes_build_info", "Always 1; the version of this process's code.", ["version"], registry=r).labels(
            __version__
        ).set(1)
        self._output_tokens = self._tokens.labels("output")
        for reason in Reason:  # a series that first appears at 1 has not increased, for who asks afterwards
            self._refused.labels(str(reason))
        for kind in ("first", "retry"):
            self._attempts.labels(kind)
        self._observe_inter_token = self._inter_token.observe

    # -- every process ---------------------------------------------------------------------------------------

    def loop_kept(self, name: str) -> None:
        """A background loop begins: a series that first appears at 1 has not increased, for who asks afterwards."""
        self._loop_restarts.labels(name)

    def loop_restarted(self, name: str) -> None:
        """A background loop ended by itself."""
        self._loop_restarts.labels(name).inc()

    # -- ingress ---------------------------------------------------------------------------------------------

    def admitted(self, request_class: str) -> None:
        """A request was accepted."""
        self._admitted.labels(request_class).inc()

    def refused(self, reason: Reason) -> None:
        """A request was refused."""
        self._refused.labels(str(reason)).inc()

    def claimed(self, request_class: str, waited_s: float) -> None:
        """A queue entry was claimed."""
        self._queue_wait.labels(request_class).observe(max(0.0, waited_s))

    def attempted(self, epoch: int) -> None:
        """An attempt was sent to a worker."""
        self._attempts.labels("first" if epoch == 1 else "retry").inc()

    def engines_ready(self, engines: int) -> None:
        """How many engines this ingress can send work to."""
        self._engines_ready.set(engines)

    def redis_forgets(self, forgets: bool) -> None:
        """Whether Redis lost what it had accepted when it restarted last."""
        self._redis_forgets.set(forgets)

    # -- worker ----------------------------------------------------------------------------------------------

    def working_on(self, requests: int) -> None:
        """How many requests the engine holds."""
        self._in_flight.set(requests)

    def first_token(self, request_class: str, since_admission_s: float) -> None:
        """The first output of a request came."""
        self._ttft.labels(request_class).observe(max(0.0, since_admission_s))

    def output(self, tokens: int, since_last_s: float | None) -> None:
        """An engine output came (the hot path: one call a token)."""
        self._output_tokens.inc(tokens)
        if since_last_s is not None:
            self._observe_inter_token(since_last_s)

    def prompt(self, tokens: int) -> None:
        """The prompt's length became known."""
        self._tokens.labels("prompt").inc(tokens)

    def processed(self, request_class: str, processing_s: float, since_admission_s: float) -> None:
        """An attempt ended a request."""
        self._processing.labels(request_class).observe(max(0.0, processing_s))
        self._end_to_end.labels(request_class).observe(max(0.0, since_admission_s))

    def ended(self, request_class: str, state: str, reason: str) -> None:
        """A request ended."""
        self._ended.labels(request_class, state, str(reason)).inc()

    # -- pages -----------------------------------------------------------------------------------------------

    def page(self) -> bytes:
        """This process's metrics, vLLM's and the process's own among them."""
        return generate_latest(self.registry) + generate_latest(REGISTRY)

    def serve_page(self, first_port: int) -> int:
        """Serve this process's metrics on the first free port from `first_port` on; returns the port."""
        for port in range(first_port, first_port + 64):
            try:
                _start_http_server(port, registry=_Both(self.registry))
                return port
            except OSError:
                continue
        raise OSError(f"no free port for metrics in {first_port}..{first_port + 63}")


class _Both(CollectorRegistry):
    """Our registry and the default one as one."""

    def __init__(self, ours: CollectorRegistry) -> None:
        super().__init__()
        self.register(ours)
        self.register(REGISTRY)


class _Families:
    """Already collected families, as a collector."""

    def __init__(self, families: Mapping[str, Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return list(self._families.values())


def merge_pages(pages: Mapping[str, bytes], extra: CollectorRegistry | None = None) -> bytes:
    """One page of many: every sample gets the label `replica` of its page. `extra` goes in as it is."""
    families: dict[str, Metric] = {}
    for replica, page in pages.items():
        for family in _families_of(replica, page):
            target = families.get(family.name)
            if target is None:
                target = families[family.name] = Metric(family.name, family.documentation, family.type)
            for sample in family.samples:
                target.samples.append(sample._replace(labels={**sample.labels, "replica": replica}))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry) + (generate_latest(extra) if extra is not None else b"")


def _families_of(replica: str, page: bytes) -> list[Metric]:
    """None of a page that nobody can read: the others are shown all the same."""
    try:
        return list(text_string_to_metric_families(page.decode()))
    except (ValueError, LookupError) as error:
        log.error("metrics of %s left out: nobody can read them: %r", replica, error)
        return []


def queue_gauges(
    depths: Mapping[str, tuple[int, int, int, float]], redis_bytes: tuple[int, int] | None = None
) -> CollectorRegistry:
    """The state of queue and Redis, which belong to no replica.

    Args:
        depths: `{class: (waiting, claimed, limit, oldest_s)}`.
        redis_bytes: what Redis uses of its memory, and its limit (0: none); None where it does not say.
    """
    registry = CollectorRegistry()
    waiting = Gauge("hermes_queue_depth", "Requests that wait in the queue.", ["class"], registry=registry)
    claimed = Gauge("hermes_queue_claimed", "Requests claimed and not ended.", ["class"], registry=registry)
    limit = Gauge("hermes_queue_limit", "Requests that may wait.", ["class"], registry=registry)
    oldest = Gauge("hermes_queue_oldest_age_seconds", "Age of the oldest that waits.", ["class"], registry=registry)
    for name, (n_waiting, n_claimed, bound, oldest_s) in depths.items():
        waiting.labels(name).set(n_waiting)
        claimed.labels(name).set(n_claimed)
        limit.labels(name).set(bound)
        oldest.labels(name).set(oldest_s)
    if redis_bytes is not None:
        used = Gauge("hermes_redis_used_bytes", "Redis's memory, of what its limit counts.", registry=registry)
        used.set(redis_bytes[0])
        most = Gauge("hermes_redis_limit_bytes", "Redis's `maxmemory`; 0 where there is none.", registry=registry)
        most.set(redis_bytes[1])
    return registry
