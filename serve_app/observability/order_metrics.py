"""Metrics of the order of work: slots, claims, what waits, ageing, predicted lengths, and what each
tenant gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, Summary

from serve_app.observability.metrics import Maker
from serve_app.policy.classes import CLASSES
from serve_app.policy.order import Completion, Running, Scheduler

_TEXTS = {
    "hermes_slots_allowed": "Sequences that this ingress may run at a time: its share of the slots "
    "of all engines.",
    "hermes_slots_reserved": "Slots reserved for requests that this ingress has started and that "
    "have not ended.",
    "hermes_slots_long": "Of hermes_slots_reserved, those of requests that may not use the spare "
    "slots: batch, standard ones not predicted to be short, and those with more sequences than "
    "spare.",
    "hermes_claim_requests": "Requests that one claim has taken from the queue.",
    "hermes_prediction_ratio": "Output tokens of a request divided by their predicted number.",
    "hermes_prediction_error_ratio": "Error of the predicted output lengths divided by that of a "
    "constant prediction.",
    "hermes_predictions_useful": "1 if output lengths are predicted well enough to run short "
    "requests first, else 0.",
    "hermes_ageing_promotions": "Requests that started before a more urgent class because they had "
    "waited long.",
    "hermes_claimed_waiting": "Requests that this ingress has claimed from the queue and not "
    "started.",
    "hermes_claimed_oldest_age_seconds": "Age of the oldest request that this ingress has claimed "
    "and not started.",
    "hermes_tenant_served_cost": "Cost of the requests that ended, in weighted tokens "
    "(order.prompt_weight, order.output_weight).",
    "hermes_tenant_queue_wait_time_seconds": "Time from a request's acceptance to the start of its "
    "first attempt.",
    "hermes_tenant_deficit_cost": "How far a tenant with waiting requests is behind its fair "
    "share: the cost that the most served tenant of its class got beyond it, each divided by its "
    "weight.",
}
_TIMES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1, 1.4, 2, 3, 5, 10, 20)


_TENANTS = 50
OTHER_TENANTS = "@other"
"""All tenants beyond the first ones of a process; the names of tenants contain no `@`."""


class TenantTelemetry:
    """The tenants of one ingress. Only the first ones have a series of their own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = Maker(registry, _TEXTS)
        self._served = make.counter("hermes_tenant_served_cost", "class", "tenant")
        self._behind = make.gauge("hermes_tenant_deficit_cost", "class", "tenant")
        wait = "hermes_tenant_queue_wait_time_seconds"
        self._wait = Summary(wait, _TEXTS[wait], ["tenant"], registry=registry)
        self._tenants: set[str] = set()
        self._series: dict[tuple[str, str], Gauge] = {}
        """Of `_behind`, by class and tenant."""

    def started(self, tenant: str, waited_s: float) -> None:
        self._wait.labels(self._named(tenant)).observe(max(0.0, waited_s))

    def ended(self, request_class: str, tenant: str, cost: float) -> None:
        key = request_class, self._named(tenant)
        self._served.labels(*key).inc(cost)
        if key not in self._series:  # so that a tenant that never had to wait is shown, too
            self._series[key] = self._behind.labels(*key)

    def counters(self, waiting: Mapping[str, Mapping[str, float]]) -> None:
        """The virtual counters of the tenants that wait, by class; no other one is behind."""
        behind: dict[tuple[str, str], float] = {}
        for request_class, counters in waiting.items():
            most = max(counters.values(), default=0.0)
            for tenant, counter in counters.items():
                key = (request_class, self._named(tenant))
                behind[key] = max(behind.get(key, 0.0), most - counter)
        for key in behind.keys() - self._series.keys():
            self._series[key] = self._behind.labels(*key)
        for key, series in self._series.items():
            series.set(behind.get(key, 0.0))

    def _named(self, tenant: str) -> str:
        if tenant not in self._tenants and len(self._tenants) >= _TENANTS:
            return OTHER_TENANTS
        self._tenants.add(tenant)
        return tenant


_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class OrderTelemetry:
    """The metrics of one ingress's scheduler."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = Maker(registry, _TEXTS)
        self.tenants = TenantTelemetry(registry)
        self._slots_allowed = make.gauge("hermes_slots_allowed")
        self._slots_reserved = make.gauge("hermes_slots_reserved")
        self._slots_long = make.gauge("hermes_slots_long")
        self._claims = make.histogram("hermes_claim_requests", _REQUESTS)
        self._prediction_ratio = make.histogram("hermes_prediction_ratio", _TIMES)
        self._prediction_error = make.gauge("hermes_prediction_error_ratio")
        self._predictions_useful = make.gauge("hermes_predictions_useful")
        self._promotions = make.counter("hermes_ageing_promotions")
        self._claimed_waiting = make.gauge("hermes_claimed_waiting", "class")
        self._claimed_oldest = make.gauge("hermes_claimed_oldest_age_seconds", "class")
        self.waiting({}, 0)
        self._promoted = 0

    def waiting(self, lines: Mapping[str, tuple[int, int]], now_ms: int) -> None:
        """What waits in this ingress; the queue's own gauges do not count it. `lines` says of the
        classes of which some wait how many, and when the oldest was accepted (Unix ms).
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
        self._slots_long.set(scheduler.general_sequences)
        self._prediction_error.set(scheduler.lengths.error_ratio)
        lines = scheduler.lines.items()
        self.tenants.counters({name: line.counters.waiting() for name, line in lines})

    def ended(self, settled: Completion, lengths_useful: bool, promotions: int) -> None:
        """It is known what a request has written, and how often ageing has promoted one so far."""
        entry = settled.entry
        self.tenants.ended(entry.request_class, entry.tenant, settled.cost)
        if settled.written.whole:
            ratio = settled.written.tokens / max(1.0, settled.predicted.mean)
            self._prediction_ratio.observe(ratio)
        self._predictions_useful.set(lengths_useful)
        self._promotions.inc(promotions - self._promoted)
        self._promoted = promotions
