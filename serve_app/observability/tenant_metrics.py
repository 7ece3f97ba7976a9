"""The metrics of one ingress by tenant. Only the first tenants have series of their own."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Gauge

from serve_app.contract import CompletionStats, Reason
from serve_app.observability.metrics import Metrics
from serve_app.policy.standing import MINUTE, Standing

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
