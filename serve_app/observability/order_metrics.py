"""Metrics of the order of work: slots, claims, what waits, and ageing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from serve_app.observability.prediction_metrics import PredictionTelemetry
from serve_app.observability.tenant_metrics import TenantTelemetry
from serve_app.policy.classes import CLASSES
from serve_app.policy.order import Scheduler
from serve_app.policy.waiting import Running, Settled

_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class OrderTelemetry:
    """The metrics of one ingress's scheduler."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.tenants = TenantTelemetry(registry)
        self._slots_allowed = Gauge(
            "hermes_slots_allowed",
            "Sequences that this ingress may run at the same time: its share of the engines'.",
            registry=registry,
        )
        self._slots_reserved = Gauge(
            "hermes_slots_reserved",
            "Sequences of the requests that this ingress has started and that have not ended.",
            registry=registry,
        )
        self._slots_long = Gauge(
            "hermes_slots_long",
            "How many of them are of requests that have no right to a spare slot.",
            registry=registry,
        )
        self._claims = Histogram(
            "hermes_claim_requests",
            "Requests that one claim has brought.",
            registry=registry,
            buckets=_REQUESTS,
        )
        self._predictions = PredictionTelemetry(registry)
        self._promotions = Counter(
            "hermes_ageing_promotions",
            "Requests that went before a more urgent class because of their age.",
            registry=registry,
        )
        self._claimed_waiting = Gauge(
            "hermes_claimed_waiting",
            "Requests that this ingress has claimed and not started.",
            ["class"],
            registry=registry,
        )
        self._claimed_oldest = Gauge(
            "hermes_claimed_oldest_age_seconds",
            "Age of the oldest of them.",
            ["class"],
            registry=registry,
        )
        self.waiting({}, 0)
        self._promoted = 0

    def waiting(self, lines: Mapping[str, tuple[int, int]], now_ms: int) -> None:
        """What waits in this ingress; the queue's own gauges do not count it.

        Args:
            lines: how many of each class, and when the oldest was enqueued, in Unix milliseconds;
                only classes of which some wait.
        """
        for name in CLASSES:
            count, oldest_ms = lines.get(name, (0, now_ms))
            self._claimed_waiting.labels(name).set(count)
            self._claimed_oldest.labels(name).set(max(0.0, (now_ms - oldest_ms) / 1000))

    def claimed(self, requests: int) -> None:
        if requests:
            self._claims.observe(requests)

    def started(self, running: Running[Any]) -> None:
        if running.started_ms is not None:
            waited_s = (running.started_ms - running.entry.enqueued_ms) / 1000
            self.tenants.started(running.entry.tenant, waited_s)

    def order(self, scheduler: Scheduler[Any]) -> None:
        self._slots_allowed.set(scheduler.capacity)
        self._slots_reserved.set(scheduler.sequences)
        self._slots_long.set(scheduler.long_sequences)
        self._predictions.error(scheduler.lengths.error_ratio)
        lines = scheduler.lines.items()
        self.tenants.counters({name: line.counters.waiting() for name, line in lines})

    def ended(self, settled: Settled, lengths_useful: bool, promotions: int) -> None:
        """A request has ended, and it is known what it has written.

        Args:
            promotions: how many there were since the process was started.
        """
        entry = settled.entry
        self.tenants.ended(entry.request_class, entry.tenant, settled.cost)
        if settled.written.whole:
            self._predictions.compare(settled.predicted, settled.written.tokens)
        self._predictions.useful(lengths_useful)
        self._promotions.inc(promotions - self._promoted)
        self._promoted = promotions
