"""What is refused before any engine sees it, with which messages, and what must be accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.contract import ANTHROPIC, Reason
from serve_app.errors import RequestRefused
from serve_app.ingress.app import check_headers
from serve_app.ingress.connection_limits import check_content_type
from serve_app.ingress.validation.bodies import parse
from serve_app.ingress.validation.fields import INFERENCE_PATHS, PATHS
from serve_app.policy.work import work_of
from tests.tables import each

MODEL = "hermes-tiny"
CHAT = "/v1/chat/completions"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


def refused(path: str, body: bytes | dict[str, Any]) -> RequestRefused:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(RequestRefused) as caught:
        parse(path, raw, MODEL)
    return caught.value


def chat(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HELLO} | changes


@each("path", INFERENCE_PATHS)
@each(
    "body",
    [
        b'{"model": "hermes-tiny",}',
        b"\xff\xfe",
        b'{"a": NaN}',
        b"[" * 10_000,
        b"{} {}",
        "{}".encode("utf-16"),
    ],
)
def test_malformed_json_is_refused_as_such(path: str, body: bytes) -> None:
    error = refused(path, body)
    assert (error.reason, error.status) == (Reason.MALFORMED_JSON, 400)


@each(
    "body, words",
    [
        (b" ", "empty"),
        ("{}".encode("utf-16-le"), "UTF-8"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a": 1', "truncated"),
        (b'{"a": 01}', "byte 7"),
        (b'{"a": "\\\\ud800}', "truncated"),
    ],
)
def test_what_is_wrong_with_malformed_json_is_told(body: bytes, words: str) -> None:
    assert words in refused(CHAT, body).message


LONG = "é".encode() * 600_000


@each("text", [b"\\ud800", b"\\udc00", b"\\udc00\\ud800", b"x\\uD83Dx"])
@each("around", [b"", LONG])
def test_half_of_a_surrogate_pair_is_called_so(text: bytes, around: bytes) -> None:
    error = refused(CHAT, b'{"a": "' + around + text + around + b'"}')
    assert error.reason == Reason.INVALID_REQUEST
    assert "half of a surrogate pair" in error.message


@each("text", ["\\ud83d\\ude00", "\\\\ud800", "\\u0000", "\\uffff"])
def test_whole_pairs_and_escaped_backslashes_pass(text: str) -> None:
    body = f'{{"model": "{MODEL}", "messages": [], "user": "{text}"}}'
    assert "empty array" in refused(CHAT, body.encode()).message


@each(
    "written, name, number",
    [
        ("64.0", "max_tokens", 64),
        ("6.4e1", "max_tokens", 64),
        ("-1.0", "top_k", -1),
        ("[1.0, 2e0]", "stop_token_ids", [1, 2]),
        ("0.5", "temperature", 0.5),
    ],
)
def test_json_has_one_type_of_number(written: str, name: str, number: Any) -> None:
    body = json.dumps(chat())[:-1] + f', "{name}": {written}}}'
    found = parse(CHAT, body.encode(), MODEL).request[name]
    assert (found, repr(found)) == (number, repr(number))


@each("prompt", ["[1.0, 2.0]", "[[1.0], [2]]"])
def test_token_ids_may_be_written_as_any_number(prompt: str) -> None:
    body = f'{{"model": "{MODEL}", "prompt": {prompt}}}'
    found = parse("/v1/completions", body.encode(), MODEL).request["prompt"]
    assert found in ([1, 2], [[1], [2]])
    assert "." not in repr(found)


@each("path", [path for path in INFERENCE_PATHS if path.startswith("/v1/")])
@each("name", ["gpt-4", "", "HERMES-TINY", "x" * 10_000])
def test_an_unknown_model_is_not_found(path: str, name: str) -> None:
    error = refused(path, {"model": name})
    assert (error.reason, error.status, error.param) == (Reason.MODEL_NOT_FOUND, 404, "model")
    assert len(error.message) < 300


NO_MODEL = ("model", "You must provide a model parameter.")


@each(
    "body, param, words",
    [
        *((body, None, "JSON object") for body in (b"[]", b"3", b"null", b'"text"', b"true")),
        ({"messages": HELLO}, *NO_MODEL),
        ({"model": None, "messages": HELLO}, *NO_MODEL),
        # In OpenAI's words.
        (
            chat(messages=[]),
            "messages",
            "Invalid 'messages': empty array. Expected an array with at least one element.",
        ),
        ({"model": MODEL}, "messages", "Missing required parameter: 'messages'."),
    ],
)
def test_what_is_missing_is_asked_for(
    body: bytes | dict[str, Any], param: str | None, words: str
) -> None:
    error = refused(CHAT, body)
    assert (error.reason, error.status, error.param) == (Reason.INVALID_REQUEST, 400, param)
    assert error.message == words if param else words in error.message


@each(
    "changes, param",
    [
        ({"model": 5}, "model"),
        ({"messages": {"role": "user"}}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [*HELLO, {"content": "no role"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": True}, "stream_options"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logprobs": "yes"}, "logprobs"),
        ({"seed": 2**63}, "seed"),
        ({"user": {}}, "user"),
        ({"tools": {}}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(changes: dict[str, Any], param: str) -> None:
    error = refused(CHAT, chat(**changes))
    assert (error.reason, error.status, error.param) == (Reason.INVALID_REQUEST, 400, param)
    assert f"'{param}'" in error.message


@each(
    "path, body, param",
    [
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ("/v1/responses", {}, "input"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ("/tokenize", {"model": 5}, "model"),
    ],
)
def test_other_endpoints_name_their_own_fields(path: str, body: dict[str, Any], param: str) -> None:
    error = refused(path, {"model": MODEL, **body})
    assert (error.reason, error.param) == (Reason.INVALID_REQUEST, param)


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
ASKED = {"name": "weather", "arguments": '{"city": "Oslo"}'}
CALL = {"id": "call_1", "type": "function", "function": ASKED}
CALLED: list[dict[str, Any]] = [
    {"role": "system", "content": "be kind"},
    *HELLO,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]
IMAGE = {"url": "data:image/png;base64,aGVsbG8=", "detail": "low"}
SEEN = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": IMAGE}]
MAY_BE_NULL = "stream temperature max_tokens tools n seed stop user logprobs service_tier".split()


@each(
    "path, body",
    [
        (CHAT, {"messages": HELLO, **dict.fromkeys(MAY_BE_NULL)}),
        (CHAT, {"messages": CALLED, "tools": [TOOL], "tool_choice": "auto"}),
        (CHAT, {"messages": [{"role": "user", "name": "ada", "content": SEEN}], "temperature": 0}),
        ("/v1/completions", {"prompt": "", "max_tokens": 0, "logprobs": 5, "echo": True}),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
        ("/v1/completions", {"prompt": [[1, 2], [3]]}),
        (
            "/v1/responses",
            {
                "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
                "max_output_tokens": 16,
                "stream": True,
                "previous_response_id": None,
            },
        ),
        ("/v1/embeddings", {"input": ["a"], "encoding_format": "float"}),
    ],
)
def test_what_the_openai_sdk_sends_passes_unchanged(path: str, body: dict[str, Any]) -> None:
    whole = {"model": MODEL, **body}
    raw = json.dumps(whole).encode()
    assert parse(path, raw, MODEL) == (whole, raw, [])


@each(
    "name, aliases, known",
    [
        ("gpt-5", [], False),
        ("gpt-5", ["gpt-5"], True),
        ("gpt-5-mini", ["gpt-5"], False),
        ("claude-opus-5", ["gpt-*", "claude-*"], True),
        ("claude", ["claude-*"], False),
        ("Claude-opus-5", ["claude-*"], False),
        ("a/claude-sonnet:free", ["*sonnet*"], True),
        ("two words", ["*"], True),
        ("", ["*"], False),
        ("n" * 128, ["*"], True),
        ("n" * 129, ["*"], False),
        ("a\nb", ["*"], False),
        ("a\u202eb", ["*"], False),
        ("a" * 128, ["*a" * 63 + "*b"], False),
    ],
)
@each("path", INFERENCE_PATHS)
def test_a_model_answers_to_its_aliases(
    path: str, name: str, aliases: list[str], known: bool
) -> None:
    noted = {} if path in ANTHROPIC else {"user": "\u2028"}
    given = {**PATHS[path]["example"], "model": name, **noted}
    raw = json.dumps(given, ensure_ascii=False).encode()
    if not known:
        with pytest.raises(RequestRefused) as caught:
            parse(path, raw, MODEL, aliases=aliases)
        assert (caught.value.status, caught.value.param) == (404, "model")
        return
    found = parse(path, raw, MODEL, aliases=aliases)
    assert found.request["model"] == name
    own = json.dumps({**given, "model": MODEL}, ensure_ascii=False).encode()
    journalled = parse(path, own, MODEL, aliases=aliases).body
    assert json.loads(found.body) == json.loads(journalled)


def test_only_an_alias_changes_a_body() -> None:
    raw = json.dumps(chat()).encode()
    assert parse(CHAT, raw, MODEL, aliases=["*"]).body == raw


def test_tokenize_needs_no_model() -> None:
    assert parse("/tokenize", b'{"prompt": "hello"}', MODEL).request == {"prompt": "hello"}


@each("kind", ["", "text/plain", "multipart/form-data; boundary=x", "application/jsonp"])
def test_content_types_other_than_json_are_refused(kind: str) -> None:
    for json_type in ("application/json", "application/json; charset=utf-8", "Application/JSON"):
        check_content_type(json_type)
    with pytest.raises(RequestRefused) as caught:
        check_content_type(kind)
    assert (caught.value.reason, caught.value.status) == (Reason.UNSUPPORTED_MEDIA_TYPE, 415)


def test_headers_are_counted_with_their_separators() -> None:
    headers = [(b"x-a", b"1" * 93), (b"x-b", b"2" * 93)]
    check_headers(headers, 200)
    with pytest.raises(RequestRefused) as caught:
        check_headers(headers, 199)
    assert (caught.value.reason, caught.value.status) == (Reason.HEADERS_TOO_LARGE, 431)
    assert "200 bytes" in caught.value.message


def test_a_compaction_needs_an_input_or_an_earlier_response_and_is_no_stream() -> None:
    path = "/v1/responses/compact"
    for missing in ({}, {"input": None}, {"input": None, "previous_response_id": None}):
        assert refused(path, missing).param == "input"
    parsed = parse(path, b'{"previous_response_id": "resp_1", "instructions": "Brief."}', MODEL)
    assert json.loads(parsed.body)["input"] == parsed.request["input"] == []
    for name in ("stream", "store", "background"):
        error = refused(path, {"input": "Hi", name: True})
        assert (error.param, error.message) == (name, f"Unknown parameter: '{name}'.")


CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@each(
    "path, given, wanted",
    [
        (CHAT, {}, {"max_tokens": 10}),
        (CHAT, {"max_tokens": 9}, {}),
        (CHAT, {"max_tokens": 11}, {"max_tokens": 10}),
        (CHAT, {"max_tokens": None}, {"max_tokens": 10}),
        (CHAT, {"max_completion_tokens": 11}, {"max_completion_tokens": 10}),
        (CHAT, {"max_completion_tokens": 5, "max_tokens": 11}, {}),
        (COMPLETION, {}, {"max_tokens": 10}),  # without a limit, vLLM writes 16
        (COMPLETION, {"max_completion_tokens": 11}, {"max_tokens": 10}),
        (COMPLETION, {"max_completion_tokens": 5, "max_tokens": 11}, {"max_tokens": 5}),
        (COMPLETION, {"max_tokens": 0, "echo": True}, {}),
        ("/v1/responses", {"max_output_tokens": 11}, {"max_output_tokens": 10}),
        ("/v1/responses/compact", {}, {"max_output_tokens": 10}),
        ("/v1/messages", {"max_tokens": 11}, {"max_tokens": 10}),
        ("/v1/embeddings", {}, {}),
        ("/v1/messages/count_tokens", {}, {}),
    ],
)
def test_an_answer_is_cut_to_what_its_tenant_may_have(
    path: str, given: dict[str, Any], wanted: dict[str, Any]
) -> None:
    prompt: dict[str, Any] = {"prompt" if path == COMPLETION else "input": "Hi"}
    if "chat" in path or "messages" in path:
        prompt = {"messages": [{"role": "user", "content": "Hi"}]}
    sent = {"model": "m", **prompt}
    parsed = parse(path, json.dumps(sent | given).encode(), "m", most_output=10)
    body = json.loads(parsed.body)
    left = {"max_completion_tokens"} if path == COMPLETION else set()
    assert body == {k: v for k, v in {**sent, **given}.items() if k not in left} | wanted
    limit = next(iter(wanted.values()), None)
    assert limit is None or work_of(path, parsed.body, parsed.request).max_output_tokens <= limit


def test_without_16_tokens_to_cut_a_completion_stays_as_it_is() -> None:
    body = b'{"model": "m", "prompt": "Hi"}'
    assert parse(COMPLETION, body, "m", most_output=16).body == body
