"""The metrics of the order of work: bounded, and true."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from serve_app.contract import CompletionStats
from serve_app.observability.ingress_metrics import OrderTelemetry, TenantTelemetry
from serve_app.policy.order import Completion
from serve_app.policy.prediction import Prediction
from tests.unit.virtual_order import Entry


def settled(tokens: int, tenant: str = "t", whole: bool = True) -> Completion:
    predicted = Prediction(100.0, 120.0)
    return Completion(Entry(tenant=tenant), predicted, CompletionStats(tokens, whole), 5.0)


def test_what_has_ended_is_counted_against_the_prediction() -> None:
    registry = CollectorRegistry()
    telemetry = OrderTelemetry(registry, TenantTelemetry(registry))
    for tokens in (1, 100, 150, 200, 201, 900):
        telemetry.ended(settled(tokens), lengths_useful=True, promotions=3)
    telemetry.ended(settled(1, whole=False), lengths_useful=True, promotions=3)
    assert registry.get_sample_value("hermes_prediction_ratio_count") == 6
    served = registry.get_sample_value(
        "hermes_tenant_served_cost_total", {"class": "standard", "tenant": "t"}
    )
    assert served == 7 * 5, "also of the one that was broken off"
    assert registry.get_sample_value("hermes_predictions_useful") == 1
    assert registry.get_sample_value("hermes_ageing_promotions_total") == 3
    for requests in (0, 3, 0, 5):
        telemetry.claimed(requests)
    found = [registry.get_sample_value(f"hermes_claim_requests_{n}") for n in ("count", "sum")]
    assert found == [2, 8], "claims that brought nothing do not count"
