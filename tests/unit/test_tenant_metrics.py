"""The metrics by tenant: bounded, whoever sends how much, and true to the minute."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.samples import Sample

from serve_app.contract import CompletionStats, Reason
from serve_app.observability.ingress_metrics import OTHER_TENANTS, TenantTelemetry
from serve_app.policy.classes import CLASSES
from serve_app.policy.tenant_limits import MINUTE, Limits, Over, Standing

NOW = 29_000_000
"""A minute since 1970."""
LIMITS = Limits(10, 1_000, 4, 500, 0, 10_000)
REFUSED = (Reason.RATE_LIMIT_EXCEEDED, Reason.OVERLOADED)
WRITTEN = CompletionStats(7, prompt_tokens=5)


def standing(requests: int, minute: int = NOW, limits: Limits = LIMITS) -> Standing:
    return Standing(limits, Over.NONE, minute, 0, 9_000, requests, 1_200, 1, 0)


def samples_of(registry: CollectorRegistry) -> list[Sample]:
    """As on a page, where no times of creation are."""
    found = (sample for family in registry.collect() for sample in family.samples)
    return [sample for sample in found if not sample.name.endswith("_created")]


def shown(registry: CollectorRegistry, name: str, label: str = "tenant") -> dict[str, float]:
    samples = [one for one in samples_of(registry) if one.name.removesuffix("_total") == name]
    return {sample.labels[label]: sample.value for sample in samples}


def used(registry: CollectorRegistry) -> dict[str, float]:
    return shown(registry, "hermes_tenant_limit_used_ratio", "limit")


def does_all(tenants: TenantTelemetry, tenant: str) -> None:
    tenants.admitted(tenant)
    for reason in REFUSED:
        tenants.refused(tenant, reason)
    tenants.started(tenant, 1.0)
    tenants.stands(tenant, standing(1))
    for request_class in CLASSES:
        tenants.ended(request_class, tenant, 2.0, WRITTEN)


def test_ten_thousand_tenants_make_no_more_series_than_51() -> None:
    series = {}
    for many in (51, 10_000):
        registry = CollectorRegistry()
        tenants = TenantTelemetry(registry)
        names = [f"t{number}" for number in range(many)]
        for name in names:
            does_all(tenants, name)
        tenants.counters({name: dict.fromkeys(names, 1.0) for name in CLASSES})
        tenants.show_limits(NOW * MINUTE)
        series[many] = len(samples_of(registry))
        counted = shown(registry, "hermes_tenant_requests_admitted")
        assert (counted["t49"], counted[OTHER_TENANTS]) == (1, many - 50)
        assert len(counted) == 51
    each = 1 + len(REFUSED) + 2 + 5 + 2 * len(CLASSES) + 2
    assert series[51] == series[10_000] == 51 * each


def test_tokens_and_refusals_are_counted_by_tenant() -> None:
    registry = CollectorRegistry()
    tenants = TenantTelemetry(registry)
    does_all(tenants, "t")
    tokens = shown(registry, "hermes_tenant_tokens", "kind")
    assert tokens == {"prompt": 4 * 5, "output": 4 * 7}
    refused = shown(registry, "hermes_tenant_requests_refused", "reason")
    assert refused == dict.fromkeys(REFUSED, 1)


def test_a_limit_is_shown_at_its_highest_until_the_next_minute_has_passed() -> None:
    registry = CollectorRegistry()
    tenants = TenantTelemetry(registry)
    for requests in (3, 9, 8):  # the answers of two ingresses may come in another order
        tenants.stands("t", standing(requests))
    tenants.show_limits(NOW * MINUTE + 30_000)
    assert used(registry) == {
        "requests_per_minute": 0.9,
        "tokens_per_minute": 1.2,
        "concurrent_requests": 0.25,
        "background_tokens": 0,
        "tokens_per_month": 0.9,
    }
    tenants.stands("t", standing(1, NOW + 1))
    tenants.show_limits((NOW + 1) * MINUTE)
    assert used(registry)["requests_per_minute"] == 0.9, "that of the last minute"
    tenants.show_limits((NOW + 2) * MINUTE)
    assert used(registry)["requests_per_minute"] == 0.1
    tenants.show_limits((NOW + 3) * MINUTE)
    assert set(used(registry).values()) == {0}


def test_a_limit_that_is_not_set_has_no_series_and_of_the_others_the_nearest_is_shown() -> None:
    registry = CollectorRegistry()
    tenants = TenantTelemetry(registry)
    for number in range(60):
        only = standing(number % 10, limits=Limits(requests_per_minute=10))
        tenants.stands(f"t{number}", only)
    tenants.show_limits(NOW * MINUTE)
    assert set(used(registry)) == {"requests_per_minute"}
    values = shown(registry, "hermes_tenant_limit_used_ratio")
    assert (values["t3"], values[OTHER_TENANTS]) == (0.3, 0.9)


def test_those_behind_beyond_the_bound_of_names_are_shown_as_one_with_the_farthest() -> None:
    registry = CollectorRegistry()
    tenants = TenantTelemetry(registry)
    tenants.counters({"batch": {f"t{number}": 1_000.0 - number for number in range(200)}})
    values = shown(registry, "hermes_tenant_deficit_cost")
    assert len(values) == 51
    assert (values["t0"], values["t49"], values[OTHER_TENANTS]) == (0, 49, 199)
