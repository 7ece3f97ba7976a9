"""One trace covers a request completely: HTTP, queue, dispatch, the attempt, and vLLM's own span
below it.
"""

from __future__ import annotations

import secrets

import pytest

from tests.service.collector import Told
from tests.service.services import Services
from tests.service.support import Running
from tests.waiting import until

# Four processes on two cores take minutes.
pytestmark = pytest.mark.nightly

HTTP = "POST /v1/chat/completions"
WHOLE = {HTTP, "queue", "dispatch", "attempt", "llm_request"}


def ask(service: Running) -> tuple[str, str, str]:
    """The ids of the caller's trace, of its span, and of its request."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    headers = {"traceparent": f"00-{trace_id}-{span_id}-01"}
    answer = service.ask(tokens=8, headers=headers)
    return (
        trace_id,
        span_id,
        answer.headers["x-request-id"].partition(",")[0],
    )  # Ray's Python proxy adds its own


def whole(services: Services, trace_id: str) -> dict[str, Told]:
    """The spans of a trace, once all have arrived."""
    assert services.collector is not None
    collector = services.collector
    found = until(
        "every span is there",
        lambda: t if (t := collector.trace(trace_id)).keys() >= WHOLE else None,
    )
    assert {name: len(spans) for name, spans in found.items()} == dict.fromkeys(WHOLE, 1)
    return {name: spans[0] for name, spans in found.items()}


def test_a_requests_whole_way_is_one_trace(services: Services, tensor_parallel: Running) -> None:
    trace_id, caller, request_id = ask(tensor_parallel)
    spans = whole(services, trace_id)
    http, queue, dispatch, attempt, engine = (
        spans[name] for name in (HTTP, "queue", "dispatch", "attempt", "llm_request")
    )
    assert http.parent_id == caller
    assert {span.parent_id for span in (queue, dispatch, attempt)} == {http.span_id}
    assert engine.parent_id == attempt.span_id
    assert [span.service for span in (http, dispatch, attempt, engine)] == [
        "hermes-ingress",
        "hermes-ingress",
        "hermes-worker",
        "hermes-engine",
    ]
    assert {span.facts["hermes.request_id"] for span in (http, queue, dispatch, attempt)} == {
        request_id
    }
    assert http.facts["http.response.status_code"] == 200
    assert attempt.facts["hermes.output_tokens"] == 8
    assert engine.facts["gen_ai.usage.completion_tokens"] == 8
    assert (
        http.began_ns
        <= dispatch.began_ns
        <= attempt.began_ns
        <= attempt.ended_ns
        <= http.ended_ns + 60 * 10**9
    )


def test_a_refusal_in_a_trace_has_its_reason_and_is_not_a_server_error(
    services: Services, tensor_parallel: Running
) -> None:
    trace_id = secrets.token_hex(16)
    headers = {"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"}
    answer = tensor_parallel.http.post(
        "/v1/chat/completions", json={"model": "none"}, headers=headers
    )
    assert services.collector is not None
    collector = services.collector
    (span,) = until("the span is there", lambda: collector.trace(trace_id))[HTTP]
    assert span.facts["http.response.status_code"] == answer.status_code == 404
    assert span.facts["error.type"] == answer.headers["x-hermes-reason"]
