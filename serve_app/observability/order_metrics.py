"""Metrics of the order of work: slots, claims, what waits, ageing and predicted lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from serve_app.observability.metrics import Metrics
from serve_app.observability.tenant_metrics import TenantTelemetry
from serve_app.policy.classes import CLASSES
from serve_app.policy.order import Completion, Running, Scheduler
from serve_app.policy.overload import Overload


class OrderTelemetry(Metrics):
    """The metrics of one ingress's scheduler. `tenants`: those of the same ingress."""

    def __init__(self, registry: CollectorRegistry, tenants: TenantTelemetry) -> None:
        super().__init__("order", registry)
        self._tenants = tenants
        self.waiting({}, 0)
        self._promoted = 0

    def waiting(self, lines: Mapping[str, tuple[int, int]], now_ms: int) -> None:
        """What waits in this ingress; the queue's own gauges do not count it. `lines` says of the
        classes of which some wait how many, and when the oldest was accepted (Unix ms).
        """
        for name in CLASSES:
            count, oldest_ms = lines.get(name, (0, now_ms))
            self.set("hermes_claimed_waiting", count, name)
            age_s = max(0.0, (now_ms - oldest_ms) / 1000)
            self.set("hermes_claimed_oldest_age_seconds", age_s, name)

    def claimed(self, requests: int) -> None:
        if requests:
            self.observe("hermes_claim_requests", requests)

    def started(self, running: Running[Any]) -> None:
        if running.started_ms is not None:
            waited_s = (running.started_ms - running.entry.accepted_ms) / 1000
            self._tenants.started(running.entry.tenant, waited_s)

    def order(self, scheduler: Scheduler[Any]) -> None:
        self.set("hermes_slots_allowed", scheduler.capacity)
        self.set("hermes_slots_reserved", scheduler.sequences)
        self.set("hermes_slots_long", scheduler.general_sequences)
        self.set("hermes_prediction_error_ratio", scheduler.lengths.error_ratio)
        lines = scheduler.lines.items()
        self._tenants.counters({name: line.counters.waiting() for name, line in lines})

    def overload(self, its: Overload) -> None:
        for name in CLASSES:
            self.set("hermes_estimated_wait_seconds", its.wait_s(name) or 0.0, name)
            self.set("hermes_breaker_open", name in its.open, name)

    def ended(self, settled: Completion, lengths_useful: bool, promotions: int) -> None:
        """It is known what a request has written, and how often ageing has promoted one so far."""
        entry = settled.entry
        self._tenants.ended(entry.request_class, entry.tenant, settled.cost, settled.written)
        if settled.written.whole:
            ratio = settled.written.tokens / max(1.0, settled.predicted.mean)
            self.observe("hermes_prediction_ratio", ratio)
        self.set("hermes_predictions_useful", lengths_useful)
        self.count("hermes_ageing_promotions", by=promotions - self._promoted)
        self._promoted = promotions
