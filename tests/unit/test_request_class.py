"""Which class a request gets, and who may use which."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.admission.admission import Submission
from serve_app.clock import RedisClock
from serve_app.contract import Reason
from serve_app.errors import RequestRefused
from serve_app.ingress.inference import Submissions
from serve_app.policy.classes import CLASSES, PUBLIC_CLASSES
from serve_app.policy.tenants import Tenant
from serve_app.settings import Settings


def submitted(tenant: str = "acme", header: str = "", **request: Any) -> Submission:
    whose = Tenant(tenant, classes=CLASSES if tenant == "ops" else PUBLIC_CLASSES)
    headers = {"x-hermes-class": header} if header else {}
    made = Submissions(Settings(), "wake", RedisClock())
    return made.of(whose, "/v1/completions", "", headers, b"{}", request, "")


@pytest.mark.parametrize(
    ("tier", "expected"),
    [
        ("fast", "realtime"),
        ("priority", "realtime"),
        ("flex", "batch"),
        ("auto", "standard"),
        (None, "standard"),
    ],
)
def test_the_service_tier_chooses_the_class(tier: str | None, expected: str) -> None:
    assert submitted(service_tier=tier).facts.request_class == expected
    assert submitted(service_tier=tier, header="batch").facts.request_class == "batch"


def test_only_operators_may_go_before_all_others() -> None:
    assert submitted("ops", "critical").facts.request_class == "critical"
    with pytest.raises(RequestRefused) as refused:
        submitted("acme", "critical")
    assert (refused.value.reason, refused.value.status) == (Reason.KEY_NOT_PERMITTED, 403)


def test_an_unknown_class_is_refused_without_naming_the_operators_own() -> None:
    with pytest.raises(RequestRefused, match="realtime, standard, batch") as refused:
        submitted(header="urgent")
    assert refused.value.status == 400
    assert "critical" not in str(refused.value)


def test_the_estimate_of_the_work_is_taken_from_body_and_limit() -> None:
    assert submitted(max_tokens=7).work.max_output_tokens == 7
    assert submitted(max_completion_tokens=True).work.max_output_tokens == 0
