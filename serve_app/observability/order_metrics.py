"""Metrics of the order of work: slots, claims, what waits, ageing, predicted lengths, and what each
tenant gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Gauge

from serve_app.observability.metrics import Metrics
from serve_app.policy.classes import CLASSES
from serve_app.policy.order import Completion, Running, Scheduler
from serve_app.policy.overload import Overload

_TENANTS = 50
OTHER_TENANTS = "@other"
"""All tenants beyond the first ones of a process; the names of tenants contain no `@`."""


class TenantTelemetry:
    """The tenants of one ingress. Only the first ones have a series of their own."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._tenants: set[str] = set()
        self._series: dict[tuple[str, str], Gauge] = {}
        """How far each is behind, by class and tenant."""

    def started(self, tenant: str, waited_s: float) -> None:
        name = self._named(tenant)
        self._metrics.observe("hermes_tenant_queue_wait_time_seconds", waited_s, name)

    def ended(self, request_class: str, tenant: str, cost: float) -> None:
        key = request_class, self._named(tenant)
        self._metrics.count("hermes_tenant_served_cost", *key, by=cost)
        if key not in self._series:  # so that a tenant that never had to wait is shown, too
            self._series[key] = self._metrics.of("hermes_tenant_deficit_cost", *key)

    def counters(self, waiting: Mapping[str, Mapping[str, float]]) -> None:
        """The virtual counters of the tenants that wait, by class; no other one is behind."""
        behind: dict[tuple[str, str], float] = {}
        for request_class, counters in waiting.items():
            most = max(counters.values(), default=0.0)
            for tenant, counter in counters.items():
                key = (request_class, self._named(tenant))
                behind[key] = max(behind.get(key, 0.0), most - counter)
        for key in behind.keys() - self._series.keys():
            self._series[key] = self._metrics.of("hermes_tenant_deficit_cost", *key)
        for key, series in self._series.items():
            series.set(behind.get(key, 0.0))

    def _named(self, tenant: str) -> str:
        if tenant not in self._tenants and len(self._tenants) >= _TENANTS:
            return OTHER_TENANTS
        self._tenants.add(tenant)
        return tenant


class OrderTelemetry(Metrics):
    """The metrics of one ingress's scheduler."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__("order", registry)
        self.tenants = TenantTelemetry(self)
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
            self.tenants.started(running.entry.tenant, waited_s)

    def order(self, scheduler: Scheduler[Any]) -> None:
        self.set("hermes_slots_allowed", scheduler.capacity)
        self.set("hermes_slots_reserved", scheduler.sequences)
        self.set("hermes_slots_long", scheduler.general_sequences)
        self.set("hermes_prediction_error_ratio", scheduler.lengths.error_ratio)
        lines = scheduler.lines.items()
        self.tenants.counters({name: line.counters.waiting() for name, line in lines})

    def overload(self, its: Overload) -> None:
        for name in CLASSES:
            self.set("hermes_estimated_wait_seconds", its.wait_s(name) or 0.0, name)
            self.set("hermes_breaker_open", name in its.open, name)

    def ended(self, settled: Completion, lengths_useful: bool, promotions: int) -> None:
        """It is known what a request has written, and how often ageing has promoted one so far."""
        entry = settled.entry
        self.tenants.ended(entry.request_class, entry.tenant, settled.cost)
        if settled.written.whole:
            ratio = settled.written.tokens / max(1.0, settled.predicted.mean)
            self.observe("hermes_prediction_ratio", ratio)
        self.set("hermes_predictions_useful", lengths_useful)
        self.count("hermes_ageing_promotions", by=promotions - self._promoted)
        self._promoted = promotions
