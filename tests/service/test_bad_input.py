"""Bad input gets a clear answer in OpenAI's format, raises the SDK's proper exception, and costs no
engine time.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
import pytest

from serve_app.contract import Reason
from tests.service.support import STORY, Running
from tests.tables import Failures, each
from tests.waiting import until

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
    """Number of tokens that the engines have read or written."""
    page = service.metrics()
    return page.total("vllm:prompt_tokens_total") + page.total("vllm:generation_tokens_total")


class EngineStaysIdle:
    """Nothing inside of the block reaches an engine: its counters move by what is asked afterwards,
    and no more.
    """

    def __init__(self, service: Running) -> None:
        self._service = service

    def _probe(self) -> None:
        """One good request; returns when the counters show it."""
        before = engine_tokens(self._service)
        usage = self._service.ask("A probe.", 3).json()["usage"]
        until(
            "the counters moved",
            lambda: engine_tokens(self._service) >= before + usage["total_tokens"],
        )
        self._probe_tokens = usage["total_tokens"]

    def __enter__(self) -> None:
        self._service.until_idle()
        self._probe()
        self._before = engine_tokens(self._service)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._probe()
            assert engine_tokens(self._service) == self._before + self._probe_tokens


SDK_ROWS: dict[str, tuple[dict[str, Any], type[openai.APIStatusError], str]] = {
    "an unknown model": (
        {"model": "gpt-4o", "messages": HELLO},
        openai.NotFoundError,
        "model_not_found",
    ),
    "no messages": ({"messages": []}, openai.BadRequestError, "invalid_request"),
    "a message without a role": (
        {"messages": [{"content": "x"}]},
        openai.BadRequestError,
        "invalid_request",
    ),
    "messages that are no list": ({"messages": "Hello"}, openai.BadRequestError, "invalid_request"),
    "a limit that is no number": (
        {"messages": HELLO, "max_tokens": "many"},
        openai.BadRequestError,
        "invalid_request",
    ),
    "a limit of nothing": (
        {"messages": HELLO, "max_tokens": 0},
        openai.BadRequestError,
        "invalid_request",
    ),
    "a temperature too high": (
        {"messages": HELLO, "temperature": 7},
        openai.BadRequestError,
        "invalid_request",
    ),
    "a temperature of text": (
        {"messages": HELLO, "temperature": "hot"},
        openai.BadRequestError,
        "invalid_request",
    ),
    "more minimum than maximum": (
        {"messages": HELLO, "max_tokens": 2, "extra_body": {"min_tokens": 5}},
        openai.BadRequestError,
        "invalid_request",
    ),
    "a prompt longer than the context": (
        {"messages": [{"role": "user", "content": STORY * 1000}]},
        openai.BadRequestError,
        "invalid_request",
    ),
}


def test_the_sdk_raises_its_proper_exceptions(service: Running) -> None:
    with EngineStaysIdle(service), Failures() as failures:
        for row, (request, exception, reason) in SDK_ROWS.items():
            with failures.of(row):
                with pytest.raises(exception) as caught:
                    service.sdk.chat.completions.create(**{"model": service.model, **request})
                assert type(caught.value) is exception
                check_error(caught.value.response, caught.value.status_code, reason)


def test_the_sdk_raises_its_proper_exceptions_on_completions_and_responses_too(
    service: Running,
) -> None:
    sdk: Any = service.sdk
    with EngineStaysIdle(service):
        with pytest.raises(openai.NotFoundError):
            sdk.completions.create(model="gpt-4o", prompt="x")
        with pytest.raises(openai.BadRequestError):
            sdk.completions.create(model=service.model, prompt=12)
        with pytest.raises(openai.BadRequestError):
            sdk.completions.create(model=service.model, prompt=STORY * 1000)
        with pytest.raises(openai.NotFoundError):
            sdk.responses.create(model="gpt-4o", input="x")
        with pytest.raises(openai.BadRequestError):
            sdk.responses.create(model=service.model, input=12)
        with pytest.raises(openai.BadRequestError):
            sdk.responses.create(model=service.model, input=STORY * 1000)


def test_a_streamed_request_is_refused_before_its_stream_begins(service: Running) -> None:
    with EngineStaysIdle(service):
        for messages in ([], [{"role": "user", "content": STORY * 1000}]):
            body = {"model": service.model, "messages": messages, "stream": True}
            check_error(service.http.post(CHAT, json=body), 400, "invalid_request")


def test_a_field_that_is_wrong_is_named(service: Running) -> None:
    body = {"model": service.model, "messages": HELLO, "max_tokens": "many"}
    error = check_error(service.http.post(CHAT, json=body), 400, "invalid_request")
    assert error["param"] == "max_tokens"
    error = check_error(service.http.post(CHAT, json={"messages": HELLO}), 400, "invalid_request")
    assert error["param"] == "model"


def test_a_prompt_longer_than_the_context_gets_an_error_with_the_limit(service: Running) -> None:
    body = {"model": service.model, "messages": [{"role": "user", "content": STORY * 1000}]}
    error = check_error(service.http.post(CHAT, json=body), 400, "invalid_request")
    assert "4096" in error["message"]


@each("body", [b"{", b"", b'{"model": ', b"\xff\xfe", b'{"a": 1}}', b"[" * 10_000])
def test_malformed_json_is_refused(service: Running, body: bytes) -> None:
    answer = service.http.post(CHAT, content=body, headers=JSON)
    check_error(answer, 400, "malformed_json")


SCHEMA: dict[str, Any] = {"type": "string"}
for _ in range(40):
    SCHEMA = {"type": "object", "properties": {"a": SCHEMA}}

HURTFUL_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "a number of 4,300 digits": ({"max_tokens": 10**4_299}, "max_tokens"),
    "a number of 65 bits": ({"top_k": 2**64}, "top_k"),
    "stop texts": ({"stop": ["x"] * 17}, "stop"),
    "a long stop text": ({"stop": "x" * 1_025}, "stop"),
    "stop token ids": ({"stop_token_ids": [*range(129)], "min_tokens": 1}, "stop_token_ids"),
    "biased tokens": ({"logit_bias": {str(token): 1 for token in range(1_025)}}, "logit_bias"),
    "a bias of no token": ({"logit_bias": {"-1": 1}}, "logit_bias"),
    "outputs with no structure": ({"structured_outputs": True}, "structured_outputs"),
    "allowed tokens": ({"allowed_token_ids": [*range(1_025)]}, "allowed_token_ids"),
    "bad words": ({"bad_words": ["x"] * 129}, "bad_words"),
    "log probabilities": ({"logprobs": True, "top_logprobs": 100_000}, "top_logprobs"),
    "all log probabilities of the prompt": ({"prompt_logprobs": -1}, "prompt_logprobs"),
    "answers": ({"n": 129}, "n"),
    "beams": ({"n": 64, "use_beam_search": True}, "n"),
    "a penalty beyond 32 bits": ({"repetition_penalty": 1e300}, "repetition_penalty"),
    "a regular expression": (
        {"structured_outputs": {"regex": "a" * 2_049}},
        "structured_outputs.regex",
    ),
    "a grammar": ({"structured_outputs": {"grammar": "a" * 16_385}}, "structured_outputs.grammar"),
    "choices": ({"structured_outputs": {"choice": ["a"] * 513}}, "structured_outputs.choice"),
    "a deep schema": ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs"),
    "a deep schema of a tool": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]},
        "tools",
    ),
    "a template": ({"chat_template": "{% for a in range(10**9) %}{% endfor %}"}, "chat_template"),
    "what moves caches": (
        {"kv_transfer_params": {"do_remote_prefill": True}},
        "kv_transfer_params",
    ),
    "another's id": ({"request_id": "req_1"}, "request_id"),
    "a priority": ({"priority": -1}, "priority"),
    "a picture of the metadata service": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image_url",
                            "image_url": {"url": "http://169.254.169.254/latest/meta-data"},
                        }
                    ],
                }
            ]
        },
        "messages.image_url",
    ),
}


@each("row", HURTFUL_ROWS)
def test_what_would_hurt_the_engine_is_refused_by_name(service: Running, row: str) -> None:
    fields, param = HURTFUL_ROWS[row]
    sys.set_int_max_str_digits(5_000)
    content = json.dumps({"model": service.model, "messages": HELLO, **fields})
    error = check_error(
        service.http.post(CHAT, content=content, headers=JSON), 400, "invalid_request"
    )
    assert error["param"] == param


def test_refusing_a_large_body_delays_no_other_request(service: Running) -> None:
    with EngineStaysIdle(service):
        for item in ("null", "[]", '{"a":1}'):
            items = ",".join([item] * (12_000_000 // (len(item) + 1)))
            content = f'{{"model": "{service.model}", "prompt": [{items}]}}'
            answer = service.http.post("/v1/completions", content=content.encode(), headers=JSON)
            check_error(answer, 400, "invalid_request")


@each("body", ["[]", "null", "1", '"text"', "true"])
def test_a_body_that_is_no_object_is_refused(service: Running, body: str) -> None:
    answer = service.http.post(CHAT, content=body, headers=JSON)
    check_error(answer, 400, "invalid_request")


@each("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
def test_a_content_type_other_than_json_is_refused(service: Running, kind: str | None) -> None:
    body = json.dumps({"model": service.model, "messages": HELLO})
    answer = service.http.post(CHAT, content=body, headers={"content-type": kind} if kind else {})
    check_error(answer, 415, "unsupported_media_type")


def test_a_body_over_the_limit_is_refused_whether_its_length_is_announced_or_not(
    service: Running,
) -> None:
    messages: Any = [{"role": "user", "content": "x" * (17 << 20)}]
    big = json.dumps({"model": service.model, "messages": messages}).encode()
    with EngineStaysIdle(service):
        check_error(service.http.post(CHAT, content=big, headers=JSON), 413, "body_too_large")
        parts = (big[start : start + 65536] for start in range(0, len(big), 65536))
        answer = service.http.post(CHAT, content=parts, headers=JSON)
        check_error(answer, 413, "body_too_large")
    with pytest.raises(openai.APIStatusError) as caught:
        service.sdk.chat.completions.create(
            model=service.model, messages=[{"role": "user", "content": "x" * (17 << 20)}]
        )
    assert caught.value.status_code == 413


@each(
    "method, path, status, reason",
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", "/v1/chat/completion", 404, "not_found"),
        ("GET", "/", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("PUT", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
    ],
)
def test_an_unknown_path_or_a_wrong_method_is_refused(
    service: Running, method: str, path: str, status: int, reason: str
) -> None:
    answer = service.http.request(method, path)
    check_error(answer, status, reason)
    if status == 405:
        assert answer.headers["allow"]


@each("size", [13_000, 30_000])
def test_headers_over_the_limit_are_refused(service: Running, size: int) -> None:
    body = {"model": service.model, "messages": HELLO}
    check_error(
        service.http.post(CHAT, json=body, headers={"x-long": "a" * size}), 431, "headers_too_large"
    )


@each(
    "header, value",
    [
        ("x-hermes-class", "urgent"),
        ("x-request-timeout-seconds", "soon"),
        ("x-request-timeout-seconds", "-1"),
        ("x-request-timeout-seconds", "nan"),
    ],
)
def test_a_header_of_ours_that_makes_no_sense_is_named(
    service: Running, header: str, value: str
) -> None:
    answer = service.http.post(
        CHAT, json={"model": service.model, "messages": HELLO}, headers={header: value}
    )
    error = check_error(answer, 400, "invalid_request")
    assert error["param"] == header


def test_a_deadline_that_passes_ends_the_request_and_frees_the_engine(service: Running) -> None:
    body = service.long_body()
    with service.freed():
        answer = service.http.post(CHAT, json=body, headers={"x-request-timeout-seconds": "0.8"})
        check_error(answer, 504, "deadline")
    assert service.state(answer.headers["x-request-id"])["state"] == "expired"


def test_refusals_are_counted_by_reason(service: Running) -> None:
    def refused() -> float:
        return service.metrics().total(
            "hermes_requests_refused_total", reason="unsupported_media_type"
        )

    before = refused()
    for _ in range(3):
        service.http.post(CHAT, content="x", headers={"content-type": "text/plain"})
    until("three more", lambda: refused() == before + 3)
