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
    classes = {"ops": CLASSES, "low": CLASSES[2:]}.get(tenant, PUBLIC_CLASSES)
    whose = Tenant(tenant, classes=classes)
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


@pytest.mark.parametrize(
    ("tier", "header", "expected"),
    [
        ("priority", "", "standard"),
        (None, "", "standard"),
        ("flex", "", "batch"),
        (None, "batch", "batch"),
    ],
)
def test_a_tier_above_the_highest_class_goes_at_that(
    tier: str | None, header: str, expected: str
) -> None:
    found = submitted("low", header, service_tier=tier).facts.request_class
    assert found == expected


def test_a_header_above_the_highest_class_is_refused_with_those_that_are_permitted() -> None:
    with pytest.raises(RequestRefused, match="of standard, batch") as refused:
        submitted("low", "realtime")
    assert (refused.value.reason, refused.value.status) == (Reason.KEY_NOT_PERMITTED, 403)
