"""Metrics of what each tenant gets: cost served, waits, and how far its counter is behind."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary

_TENANTS = 50
OTHER_TENANTS = "@other"
"""All tenants beyond the first ones of a process; the names of tenants contain no `@`."""


class TenantTelemetry:
    """The tenants of one ingress. Only the first ones have a series of their own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._served = Counter(
            "hermes_tenant_served_cost",
            "Cost of the requests that ended, by tenant.",
            ["class", "tenant"],
            registry=registry,
        )
        self._wait = Summary(
            "hermes_tenant_queue_wait_time_seconds",
            "Time from the queue entry to the start of its first attempt, by tenant.",
            ["tenant"],
            registry=registry,
        )
        self._behind = Gauge(
            "hermes_tenant_behind_cost",
            "How much less a tenant that waits was served than the one of its class that was "
            "served most, in cost divided by weight.",
            ["class", "tenant"],
            registry=registry,
        )
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
        """What the tenants that wait were served, by class: each virtual counter. A tenant that
        does not wait is not behind.
        """
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
