"""The metrics that only an ingress has: of tenants, of the order of work, and of batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Gauge

from serve_app.contract import CompletionStats, Reason
from serve_app.observability.metrics import Metrics
from serve_app.policy.classes import CLASSES
from serve_app.policy.order import Completion, Running, Scheduler
from serve_app.policy.overload import Overload
from serve_app.policy.tenant_limits import MINUTE, Standing

_TENANTS = 50
OTHER_TENANTS = "@other"
"""All tenants beyond the first ones of a process; the names of tenants contain no `@`."""


class TenantTelemetry(Metrics):
    """Every label `tenant` of an ingress comes from here: it has at most 51 values."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__("tenants", registry)
        self._tenants: set[str] = set()
        self._behind: dict[tuple[str, str], Gauge] = {}
        """How far each is behind, by class and tenant."""
        self._used: dict[tuple[str, str], dict[int, float]] = {}
        """The highest used share by minute, by tenant and limit."""

    def admitted(self, tenant: str) -> None:
        self.count("hermes_tenant_requests_admitted", self._named(tenant))

    def refused(self, tenant: str, reason: Reason) -> None:
        self.count("hermes_tenant_requests_refused", self._named(tenant), reason)

    def started(self, tenant: str, waited_s: float) -> None:
        self.observe("hermes_tenant_queue_wait_time_seconds", waited_s, self._named(tenant))

    def ended(self, request_class: str, tenant: str, cost: float, written: CompletionStats) -> None:
        name = self._named(tenant)
        key = request_class, name
        self.count("hermes_tenant_served_cost", *key, by=cost)
        for kind, tokens in (("prompt", written.prompt_tokens), ("output", written.tokens)):
            self.count("hermes_tenant_tokens", name, kind, by=tokens)
        if key not in self._behind:  # so that a tenant that never had to wait is shown, too
            self._behind[key] = self.of("hermes_tenant_deficit_cost", *key)

    def counters(self, waiting: Mapping[str, Mapping[str, float]]) -> None:
        """The virtual counters of the tenants that wait, by class; no other one is behind."""
        behind: dict[tuple[str, str], float] = {}
        for request_class, counters in waiting.items():
            most = max(counters.values(), default=0.0)
            for tenant, counter in counters.items():
                key = (request_class, self._named(tenant))
                behind[key] = max(behind.get(key, 0.0), most - counter)
        for key in behind.keys() - self._behind.keys():
            self._behind[key] = self.of("hermes_tenant_deficit_cost", *key)
        for key, series in self._behind.items():
            series.set(behind.get(key, 0.0))

    def stands(self, tenant: str, standing: Standing) -> None:
        """What Redis has told of a tenant's limits with a request; `show_limits` shows it."""
        for limit, share in standing.used():
            by_minute = self._used.setdefault((self._named(tenant), limit), {})
            by_minute[standing.minute] = max(share, by_minute.get(standing.minute, 0.0))

    def show_limits(self, now_ms: int) -> None:
        """Show the highest share of this minute and of the last, because who reads the page once a
        minute would otherwise see a limit of a minute at any height but its end. Call it often.

        Args:
            now_ms: Unix time in milliseconds by Redis's clock.
        """
        last = now_ms // MINUTE - 1
        for key, by_minute in self._used.items():
            self._used[key] = known = {at: by_minute[at] for at in by_minute if at >= last}
            self.set("hermes_tenant_limit_used_ratio", max(known.values(), default=0.0), *key)

    def _named(self, tenant: str) -> str:
        if tenant not in self._tenants and len(self._tenants) >= _TENANTS:
            return OTHER_TENANTS
        self._tenants.add(tenant)
        return tenant


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


class BatchTelemetry(Metrics):
    """Those of batches, which the ingress that works on them shows."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__("batches", registry)
        self._shown: dict[Gauge, frozenset[str]] = {}
        """The labels of each gauge."""
        # Prometheus sees no increase to the first value of a series.
        for outcome in ("completed", "failed", "expired", "cancelled"):
            self.of("hermes_batch_lines_done", outcome)

    def done(self, outcome: str, lines: int) -> None:
        """So many lines have ended like that."""
        self.count("hermes_batch_lines_done", outcome, by=lines)

    def show(
        self, batches: Mapping[str, int], lines: Mapping[str, int], spare_s: Mapping[str, float]
    ) -> None:
        """What there is now: batches and lines by state, and the seconds that batches can spare,
        by their ids.
        """
        self._only(self.of("hermes_batches"), batches)
        self._only(self.of("hermes_batch_lines"), lines)
        self._only(self.of("hermes_batch_spare_seconds"), spare_s)

    def _only(self, gauge: Gauge, values: Mapping[str, float]) -> None:
        for label, value in values.items():
            gauge.labels(label).set(value)
        for label in self._shown.get(gauge, frozenset()) - values.keys():
            gauge.remove(label)
        self._shown[gauge] = frozenset(values)

    def clear(self) -> None:
        """Another ingress works on the batches."""
        self.show({}, {}, {})
