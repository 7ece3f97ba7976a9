"""What log lines and spans say about a request."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from serve_app.contract import Reason
from serve_app.observability.logs import Outage, _formatter, about
from serve_app.observability.tracing import Span, Tracing
from serve_app.settings import TelemetrySettings
from tests.turned_clock import TurnedClock

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def sampled(span: Span) -> bool:
    """By the last flag of its `traceparent`; the one before only says that the id is random."""
    return bool(int(span.traceparent[-2:], 16) & 1)


def line(log_format: str, text: str = "request %s ended", of: str = "req_1", **extra: str) -> str:
    caught = sys.exc_info() if sys.exc_info()[0] else None
    record = logging.LogRecord("hermes.ingress", logging.INFO, "app.py", 1, text, (of,), caught)
    record.__dict__.update(extra)
    return _formatter(log_format, "replica-7").format(record)


def test_a_json_line_has_what_it_is_about_as_fields() -> None:
    found = json.loads(line("json", **about("req_1", "acme", Reason.DEADLINE, TRACEPARENT)))
    assert found.pop("timestamp")
    assert found == {
        "level": "INFO",
        "logger": "hermes.ingress",
        "message": "request req_1 ended",
        "replica": "replica-7",
        "request_id": "req_1",
        "tenant": "acme",
        "reason": "deadline",
        "trace_id": TRACEPARENT.split("-")[1],
    }


HOSTILE = "a\r\n2026-01-01 INFO hermes: forged\x1b[2J\x00\x85\u2028\u202e%s"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_nothing_that_a_client_sends_begins_a_line_or_controls_a_terminal(log_format: str) -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        found = line(log_format, "refused: %s", HOSTILE, **about("req_1", HOSTILE, HOSTILE))
    lines = found.split("\n")
    assert all(text.isprintable() for text in lines)
    assert all(text.startswith("    ") for text in lines[1:])
    assert sum("forged" in text for text in lines if not text.startswith("    ")) == 1
    if log_format == "json":
        assert json.loads(lines[0])["message"] == f"refused: {HOSTILE}"


def test_without_an_endpoint_nothing_is_traced() -> None:
    with Tracing(TelemetrySettings(), "hermes-ingress", "i").begin(
        "queue", TRACEPARENT, {"a": 1}
    ) as span:
        assert span.traceparent == ""
        span.tell({"b": 2})


def test_a_span_hands_its_trace_on() -> None:
    traced = TelemetrySettings(traces_endpoint="http://127.0.0.1:9/v1/traces")
    tracing = Tracing(traced, "hermes-ingress", "i")
    for parent, trace_id in ((TRACEPARENT, TRACEPARENT.split("-")[1]), ("", None), ("odd", None)):
        span = tracing.begin("queue", parent, {})  # not ended: nothing is to be sent
        _, found, own, _ = span.traceparent.split("-")
        assert sampled(span)
        assert own != TRACEPARENT.split("-")[2]
        assert found == trace_id if trace_id else len(found) == 32


def test_a_callers_sampling_decision_overrides_the_ratio() -> None:
    settings = TelemetrySettings(
        traces_endpoint="http://127.0.0.1:9/v1/traces", traces_sample_ratio=0
    )
    tracing = Tracing(settings, "hermes-ingress", "i")
    assert not sampled(tracing.begin("a", "", {}))
    assert sampled(tracing.begin("a", TRACEPARENT, {}))
    assert not sampled(tracing.begin("a", TRACEPARENT[:-2] + "00", {}))


def test_an_outage_is_logged_in_two_lines_however_many_callers_fail(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = TurnedClock()
    outage = Outage(logging.getLogger("hermes.test"), "cannot append", clock)
    with caplog.at_level(logging.INFO, logger="hermes.test"):
        outage.over()
        outage.failed("no connection")
        clock.now_s += 2.5
        outage.failed("no answer")
        outage.over()
        outage.over()
    assert caplog.messages == ["cannot append: no connection", "cannot append: over, after 2.5 s"]
