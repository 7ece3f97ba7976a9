"""Bad input gets a clear answer in OpenAI's format, raises the SDK's proper exception, and costs no
engine time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from serve_app.contract import Reason
from tests.service.support import STORY, Running
from tests.tables import Failures, each

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]


def check_error(answer: Any, status: int, reason: str) -> dict[str, Any]:
    """OpenAI's error shape, with the reason in the header; returns the error. The SDK's responses
    are of a class of their own.
    """
    assert answer.status_code == status, answer.text
    assert answer.headers["x-hermes-reason"] == reason
    assert reason in set(Reason)
    assert answer.headers["content-type"].startswith("application/json")
    error: dict[str, Any] = answer.json()["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    assert error["type"] in {"invalid_request_error", "rate_limit_error", "timeout_error"}
    assert isinstance(error["code"], str)
    assert "param" in error
    return error


def engine_tokens(service: Running) -> float:
    """Number of tokens that the engines have read or written, for all that was asked so far."""
    page = service.settled()
    return page.total("vllm:prompt_tokens_total") + page.total("vllm:generation_tokens_total")


@contextmanager
def engine_stays_idle(service: Running) -> Iterator[None]:
    """Nothing inside of the block reaches an engine."""
    service.ask("A probe.", 3)
    before = engine_tokens(service)
    assert before > 0
    yield
    assert engine_tokens(service) == before


TOO_LONG = STORY * 1000
NOT_TAKEN: list[dict[str, Any]] = [
    {"messages": "Hello"},
    {"messages": HELLO, "temperature": 7},
    {"messages": HELLO, "max_tokens": 2, "extra_body": {"min_tokens": 5}},
    {"messages": [{"role": "user", "content": TOO_LONG}]},
]


def test_the_sdk_raises_its_proper_exceptions(service: Running) -> None:
    chat, completions = service.sdk.chat.completions.create, service.sdk.completions.create
    responses, bad = service.sdk.responses.create, openai.BadRequestError
    rows: list[tuple[Any, dict[str, Any], type[openai.APIStatusError]]] = [
        (chat, {"model": "gpt-4o", "messages": HELLO}, openai.NotFoundError),
        *((chat, fields, bad) for fields in NOT_TAKEN),
        (completions, {"model": "gpt-4o", "prompt": "x"}, openai.NotFoundError),
        *((completions, {"prompt": prompt}, bad) for prompt in (12, TOO_LONG)),
        (responses, {"model": "gpt-4o", "input": "x"}, openai.NotFoundError),
        *((responses, {"input": text}, bad) for text in (12, TOO_LONG)),
    ]
    with engine_stays_idle(service), Failures() as failures:
        for create, fields, exception in rows:
            with failures.of(create, fields):
                with pytest.raises(exception) as caught:
                    create(**{"model": service.model, **fields})
                assert type(caught.value) is exception
                reason = "invalid_request" if exception is bad else "model_not_found"
                if TOO_LONG in str(fields):
                    reason = "context_length_exceeded"
                check_error(caught.value.response, caught.value.status_code, reason)


def test_a_streamed_request_is_refused_before_its_stream_begins(service: Running) -> None:
    with engine_stays_idle(service):
        for content, reason in ((3, "invalid_request"), (TOO_LONG, "context_length_exceeded")):
            messages = [{"role": "user", "content": content}]
            body = {"model": service.model, "messages": messages, "stream": True}
            error = check_error(service.http.post(CHAT, json=body), 400, reason)
            assert error["param"].startswith("messages")
    assert "4096" in error["message"], "the limit of the context"


LATIN_1 = b"caf\xe9"
READ_BY_SERVE = (
    *("x-request-id", "x-session-id", "x_session_id", "serve_multiplexed_model_id"),
    *("serve-multiplexed-model-id", "x-request-disconnect-disabled"),
    "x-ray-serve-request-timeout-seconds",
)
READ_BY_US = ("traceparent", "last-event-id", "idempotency-key", "authorization", "x-own")
NUMBERS = ("x-request-timeout-seconds", "x-hermes-class")


def test_a_header_may_have_any_bytes(service: Running) -> None:
    """Java and .NET send ISO-8859-1, and Serve reads some headers before the application does."""
    body = {"model": service.model, "messages": HELLO, "max_tokens": 1}
    with Failures() as failures:
        for name in (*READ_BY_SERVE, *READ_BY_US, *NUMBERS):
            headers: list[tuple[bytes, bytes]] = [(name.encode(), LATIN_1)]
            with failures.of("GET", name):
                assert service.http.get("/v1/models", headers=headers).status_code == 200
            with failures.of("POST", name):
                answer = service.http.post(CHAT, json=body, headers=headers)
                assert answer.status_code == (400 if name in NUMBERS else 200), answer.text
                if name == "x-request-id":
                    shown = dict(answer.headers.raw)[b"x-client-request-id"]
                    assert shown == LATIN_1


WRONG_SCHEMA = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "wat"}},
    }
}


@pytest.mark.parametrize(
    "wrong", [WRONG_SCHEMA, {"structured_outputs": {"grammar": "root ::= (root){0,20}"}}]
)
def test_what_the_engine_finds_wrong_has_the_same_status_streamed_and_not(
    service: Running, wrong: dict[str, Any]
) -> None:
    """vLLM finds it after the stream's own status; nothing of it was sent by then."""
    body = {"model": service.model, "messages": HELLO, **wrong}
    found = []
    for stream in (False, True):
        answer = service.http.post(CHAT, json={**body, "stream": stream})
        found.append(check_error(answer, 400, "invalid_request"))
        state = service.state(answer.headers["x-request-id"])
        assert (state["state"], state["reason"]) == ("failed", "invalid_request")
    assert found[0] == found[1]


def test_a_body_over_the_limit_is_refused_whether_its_length_is_announced_or_not(
    service: Running,
) -> None:
    messages: Any = [{"role": "user", "content": "x" * (17 << 20)}]
    big = json.dumps({"model": service.model, "messages": messages}).encode()
    with engine_stays_idle(service):
        check_error(service.http.post(CHAT, content=big, headers=JSON), 413, "body_too_large")
        parts = (big[start : start + 65536] for start in range(0, len(big), 65536))
        answer = service.http.post(CHAT, content=parts, headers=JSON)
        check_error(answer, 413, "body_too_large")


@each("method, path", [("GET", "/v1/nothing"), ("PUT", CHAT)])
def test_an_unknown_path_or_a_wrong_method_is_refused(
    service: Running, method: str, path: str
) -> None:
    answer = service.http.request(method, path)
    if method == "GET":
        check_error(answer, 404, "not_found")
    else:
        check_error(answer, 405, "method_not_allowed")
        assert answer.headers["allow"]


def test_headers_over_the_limit_are_refused(service: Running) -> None:
    body, headers = {"model": service.model, "messages": HELLO}, {"x-long": "a" * 30_000}
    check_error(service.http.post(CHAT, json=body, headers=headers), 431, "headers_too_large")


def test_a_deadline_that_passes_ends_the_request_and_frees_the_engine(service: Running) -> None:
    body = service.long_body()
    with service.freed():
        answer = service.http.post(CHAT, json=body, headers={"x-request-timeout-seconds": "0.8"})
        check_error(answer, 504, "deadline")
    assert service.state(answer.headers["x-request-id"])["state"] == "expired"
