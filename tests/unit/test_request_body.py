"""What OpenAI's schema allows is handed to vLLM as vLLM takes it, and all else as it came."""

from __future__ import annotations

import json
from typing import Any

from tests.tables import each
from workers.request_body import as_vllm_takes

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
USER = {"role": "user", "content": "Hi"}


def sent(path: str, body: dict[str, Any]) -> Any:
    found = json.loads(as_vllm_takes(path, json.dumps(body).encode(), "req_1"))
    assert found.pop("request_id", None) == ("resp_req_1" if path == RESPONSES else None)
    return found


def test_a_body_without_null_is_not_read() -> None:
    for body in (b'{"messages": [],  "n": 1}', b"[]", b"not JSON"):
        assert as_vllm_takes(CHAT, body, "req_1") is body


@each("path", [CHAT, "/v1/completions", RESPONSES])
def test_null_is_as_good_as_nothing(path: str) -> None:
    message = {**USER, "name": None}
    nested = {"const": None, "enum": [None]}
    body = {"n": None, "messages": [message], "tools": [{"type": "t", "strict": None}], "x": nested}
    want = {"messages": [USER], "tools": [{"type": "t"}], "x": nested}
    assert sent(path, body) == want
    assert sent(path, {"max_tokens": None}) == {"max_tokens": None}, "that is no default of vLLM's"


@each(
    "item, want",
    [
        (USER, {"type": "message", **USER}),
        ({"type": "message", **USER}, {"type": "message", **USER}),
        ({"type": "reasoning", "id": "r", "summary": []}, None),
        ({"type": "function_call_output", "call_id": "c", "output": "x", "id": None}, ...),
        ("text", None),
    ],
)
def test_a_message_needs_no_type(item: Any, want: Any) -> None:
    if want is ...:
        want = {k: v for k, v in item.items() if v is not None}
    assert sent(RESPONSES, {"input": [item]}) == {"input": [want or item]}
    assert sent(CHAT, {"input": [item], "n": None})["input"] in ([item], [want])
    thought: dict[str, Any] = {"type": "reasoning", "id": "r", "content": []}
    for given in (thought, {**thought, "summary": None}, {**thought, "summary": []}):
        (found,) = sent(RESPONSES, {"input": [given]})["input"]
        assert found == {**thought, "summary": []}


@each(
    "tool, strict",
    [
        ({"parameters": {"type": "object"}}, True),
        ({"parameters": {"type": "object"}, "strict": None}, True),
        ({"parameters": {"type": "object"}, "strict": False}, False),
        ({"parameters": {"type": "number", "multipleOf": 7}}, None),
        ({"parameters": {"type": "number", "multipleOf": 7}, "strict": True}, True),
        ({}, None),
        ({"type": "mcp", "parameters": {"type": "object"}}, None),
    ],
)
def test_a_function_of_a_response_is_strict_where_it_can_be(
    tool: dict[str, Any], strict: bool | None
) -> None:
    (found,) = sent(RESPONSES, {"tools": [{"type": "function", "name": "f", **tool}]})["tools"]
    assert found.get("strict") is strict
    (found,) = sent(CHAT, {"n": None, "tools": [{"type": "function", "name": "f", **tool}]})[
        "tools"
    ]
    assert found.get("strict") == tool.get("strict")


@each(
    "parts, text",
    [
        ([{"type": "output_text", "text": "a", "annotations": []}], "a"),
        ([{"type": "refusal", "refusal": "No."}, {"type": "output_text", "text": "b"}], "No.b"),
        ([], ""),
        ([{"type": "wat", "text": "a"}], None),
        ([{"type": "output_text", "text": 3}], None),
        (["a"], None),
        ("a", None),
    ],
)
def test_an_answer_is_its_whole_text(parts: Any, text: str | None) -> None:
    for item in (
        {"role": "assistant", "content": parts},
        {
            "type": "message",
            "id": "m",
            "status": "completed",
            "role": "assistant",
            "content": parts,
        },
    ):
        whole = {"type": "message", "role": "assistant", "content": text}
        (found,) = sent(RESPONSES, {"input": [item]})["input"]
        assert found == ({"type": "message", **item} if text is None else whole)
    unfinished = {**item, "status": "incomplete"}
    (found,) = sent(RESPONSES, {"input": [unfinished]})["input"]
    assert found == (unfinished if parts else whole), "parts are continued"


PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AA"}


@each(
    "item",
    [
        {"type": "function_call_output", "call_id": "c", "output": [PICTURE]},
        {"type": "custom_tool_call_output", "call_id": "c", "output": [PICTURE]},
        {"type": "message", "role": "user", "content": [PICTURE]},
        {"type": "wat", "deep": [{"er": [PICTURE]}]},
    ],
)
def test_a_picture_is_looked_at_as_closely_as_it_says_anywhere(item: Any) -> None:
    asked = json.dumps(item)
    for path, field in ((RESPONSES, "input"), (CHAT, "messages")):
        for detail, want in ((None, "auto"), ("low", "low")):
            given = asked.replace('AA"', f'AA", "detail": {json.dumps(detail)}, "file_id": null')
            looked_at = asked.replace('AA"', f'AA", "detail": "{want}"')
            assert sent(path, {field: [json.loads(given)]}) == {field: [json.loads(looked_at)]}
        auto = json.loads(asked.replace('AA"', 'AA", "detail": "auto"'))
        assert sent(path, {field: [item]}) == {field: [auto]}


def function(name: str, path: str) -> dict[str, Any]:
    named = {"name": name}
    return {"type": "function", **(named if path == RESPONSES else {"function": named})}


@each("path", [CHAT, RESPONSES])
def test_only_allowed_tools_are_there_to_be_called(path: str) -> None:
    tools = [*(function(name, path) for name in "fgh"), {"type": "mcp", "server_label": "s"}]
    for mode, some in (("auto", tools[1:2]), ("required", [tools[3], tools[0]])):
        allowed = {"mode": mode, "tools": some}
        choice: Any = (
            {**allowed, "allowed_tools": 3} if path == RESPONSES else {"allowed_tools": allowed}
        )
        body: Any = {"tools": tools, "tool_choice": {"type": "allowed_tools", **choice}}
        want = [tool for tool in tools if tool in some]
        assert sent(path, body) == {"tools": want, "tool_choice": mode}
    for other in ("auto", None, tools[0]):
        body = {"tools": tools, "tool_choice": other}
        assert sent(path, body)["tools"] == tools


@each(
    "wanted, obeyed",
    [
        ({"type": "json_object", "schema": {"type": "object"}}, True),
        ({"type": "json_object", "schema": None}, False),
        ({"type": "json_object"}, False),
        ({"type": "text"}, False),
    ],
)
def test_a_schema_beside_json_object_is_one_to_obey(wanted: Any, obeyed: bool) -> None:
    inner: dict[str, Any] = {"name": "answer", "schema": {"type": "object"}}
    for path in (CHAT, "/v1/completions"):
        found = sent(path, {"response_format": wanted})["response_format"]
        assert found == ({"type": "json_schema", "json_schema": inner} if obeyed else wanted)
    found = sent(RESPONSES, {"text": {"format": wanted, "verbosity": "low"}})["text"]
    assert found["verbosity"] == "low"
    assert found["format"] == ({"type": "json_schema", **inner} if obeyed else wanted)


def test_what_vllm_does_not_know_of_openais_words_is_another_one() -> None:
    logprobs = "message.output_text.logprobs"
    body = {"service_tier": "fast", "include": ["web_search_call.results", logprobs, "wat"]}
    want = {"service_tier": "priority", "include": [logprobs, "wat"]}
    assert sent(RESPONSES, body) == want
    assert sent(CHAT, {"service_tier": "fast"}) == {"service_tier": "priority"}


def test_a_grammar_is_told_and_functions_in_a_namespace_are_strict() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    custom = {"type": "custom", "name": "c", "description": "Edits.", "format": grammar}
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    namespace = {"type": "namespace", "name": "n", "tools": [function, custom]}
    told, outer = sent(RESPONSES, {"tools": [custom, namespace]})["tools"]
    assert told["format"] == {"type": "text"}
    assert told["description"].startswith("Edits.")
    assert told["description"].endswith("start: /.+/")
    assert outer["tools"] == [{**function, "strict": True}, told]
    for free in ({"type": "text"}, None):
        (found,) = sent(RESPONSES, {"tools": [{**custom, "format": free}]})["tools"]
        assert found["description"] == "Edits."
