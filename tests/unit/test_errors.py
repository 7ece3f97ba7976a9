"""The closed set of reasons, and the HTTP form of each."""

from __future__ import annotations

import json
import random

import pytest

from serve_app.contract import ANTHROPIC, Reason, State
from serve_app.errors import REASONS, HermesError, RequestRefused, error_body
from serve_app.journal.reader import Ending
from tests.tables import each

_RETRYABLE = {
    Reason.QUEUE_FULL,
    Reason.STORAGE_FULL,
    Reason.RESULTS_FULL,
    Reason.TENANT_LIMIT,
    Reason.RATE_LIMIT_EXCEEDED,
    Reason.CONCURRENCY_LIMIT,
    Reason.OVERLOADED,
    Reason.TOO_MANY_CONNECTIONS,
    Reason.UPLOAD_TIMEOUT,
    Reason.JOURNAL_UNAVAILABLE,
    Reason.STORAGE_UNAVAILABLE,
    Reason.DEADLINE,
    Reason.ATTEMPT_LOST,
}


@each("reason", Reason)
def test_every_reason_has_its_http_form_and_can_be_an_ending(reason: Reason) -> None:
    refused = RequestRefused(reason, "words", param="messages")
    assert isinstance(refused, HermesError)
    assert 400 <= refused.status < 600
    assert json.loads(refused.body()) == error_body(reason, "words", "messages")
    error = json.loads(refused.body())["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == reason.value
    assert error["type"]
    headers = refused.headers()
    assert headers["x-hermes-reason"] == reason.value
    assert ("x-should-retry" in headers) == (reason not in _RETRYABLE)
    assert headers.get("x-should-retry", "false") == "false"
    assert "retry-after" not in headers
    message = Ending(State.FAILED, reason, None).message
    assert message.endswith(".")
    assert "\n" not in message
    assert REASONS[reason].advice.endswith(".")
    assert reason in _RETRYABLE or "again" not in message


OF_ONE_TENANT = {
    Reason.TENANT_LIMIT,
    Reason.RATE_LIMIT_EXCEEDED,
    Reason.CONCURRENCY_LIMIT,
    Reason.QUOTA_EXCEEDED,
}
ANTHROPICS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}


@each("reason", Reason)
def test_every_reason_has_a_form_in_anthropics_protocol(reason: Reason) -> None:
    refused = RequestRefused(reason, "words", param="messages")
    for path in ANTHROPIC:
        body, status = json.loads(refused.body(path)), refused.status_at(path)
        assert body.keys() == {"type", "error"}
        assert (body["type"], body["error"]["message"]) == ("error", "words")
        kind = ANTHROPICS.get(status, body["error"]["type"])
        assert body["error"]["type"] == kind
        assert kind in {*ANTHROPICS.values()}
        overloaded = refused.status in (429, 503) and reason not in OF_ONE_TENANT
        assert status == (529 if overloaded else refused.status)
    assert refused.status_at("/v1/chat/completions") == refused.status


@pytest.mark.parametrize(("seconds", "least", "most"), [(0.01, 1, 2), (1.4, 1, 3), (30, 30, 60)])
def test_retry_after_is_whole_seconds_never_zero_and_not_the_same_for_all(
    seconds: float, least: int, most: int
) -> None:
    random.seed(1)
    refused = RequestRefused(Reason.QUEUE_FULL, "full", retry_after_s=seconds)
    headers = [refused.headers() for _ in range(100)]
    assert all(least <= int(one["retry-after"]) <= most for one in headers)
    assert len({one["retry-after-ms"] for one in headers}) > 50
