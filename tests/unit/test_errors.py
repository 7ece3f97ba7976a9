"""The closed set of reasons, and the HTTP form of each."""

from __future__ import annotations

import json
import random

import pytest

from scripts.pages import ADVICE
from serve_app.contract import Reason, State
from serve_app.errors import HermesError, RequestRefused, error_body
from serve_app.journal.reader import Ending
from tests.tables import each

_RETRYABLE = {
    Reason.QUEUE_FULL,
    Reason.STORAGE_FULL,
    Reason.RESULTS_FULL,
    Reason.TENANT_LIMIT,
    Reason.TOO_MANY_CONNECTIONS,
    Reason.UPLOAD_TIMEOUT,
    Reason.JOURNAL_UNAVAILABLE,
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
    assert ADVICE[reason].endswith(".")
    assert reason in _RETRYABLE or "again" not in message


@pytest.mark.parametrize(("seconds", "least", "most"), [(0.01, 1, 2), (1.4, 1, 3), (30, 30, 60)])
def test_retry_after_is_whole_seconds_never_zero_and_not_the_same_for_all(
    seconds: float, least: int, most: int
) -> None:
    random.seed(1)
    refused = RequestRefused(Reason.QUEUE_FULL, "full", retry_after_s=seconds)
    headers = [refused.headers() for _ in range(100)]
    assert all(least <= int(one["retry-after"]) <= most for one in headers)
    assert len({one["retry-after-ms"] for one in headers}) > 50
