"""What would be taken and have no effect is refused, by the field that has it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.contract import ANTHROPIC, INPUT_TOKENS
from serve_app.errors import RequestRefused
from serve_app.ingress.validation.bodies import parse
from tests.tables import each

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
OBJECT = {"type": "object"}
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"prompt": "Hi"},
    RESPONSES: {"input": "Hi"},
    INPUT_TOKENS: {"input": "Hi"},
    **{
        path: {"messages": [{"role": "user", "content": "Hi"}], **more}
        for path, more in zip(ANTHROPIC, ({"max_tokens": 8}, {}), strict=True)
    },
}


def param(path: str, **fields: Any) -> str | None:
    """The field for which a request is refused; "" if it is taken."""
    body = {"model": "hermes-tiny", **BASE[path], **fields}
    try:
        parse(path, json.dumps(body).encode(), "hermes-tiny")
    except RequestRefused as error:
        return error.param if f"'{error.param}'" in error.message else error.message
    return ""


def chats(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": OBJECT, **more}}


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": OBJECT, **more}


CHAT_TOOLS = [chats("f"), {"function": {"name": "g"}}]
TOOLS = [
    function("f"),
    {"type": "custom", "name": "c"},
    {"type": "web_search"},
    {"type": "mcp", "server_label": "s"},
    {"type": "namespace", "name": "n", "tools": [function("i")]},
]
F = {"type": "function", "name": "f"}


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {"mode": mode, "tools": list(tools)}


def in_chat(*args: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": allowed(*args)}


def in_response(*args: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", **allowed(*args)}


@each(
    "choice, place",
    [
        ("auto", ""),
        ("none", ""),
        ("required", ""),
        (None, ""),
        (chats("f"), ""),
        ({"function": {"name": "g"}}, ""),
        (in_chat("auto", {"type": "function", "function": {"name": "f"}}), ""),
        (in_chat("required", chats("f"), chats("g")), ""),
        ("wat", "tool_choice"),
        (3, "tool_choice"),
        ({"type": "function"}, "tool_choice.function"),
        (F, "tool_choice.function"),
        (chats("h"), "tool_choice.function.name"),
        ({"type": "custom", "custom": {"name": "f"}}, "tool_choice.type"),
        ({"type": "web_search_preview"}, "tool_choice.type"),
        (in_response("auto", F), "tool_choice.allowed_tools"),
        (in_chat("auto"), "tool_choice.allowed_tools.tools"),
        (in_chat("none", chats("f")), "tool_choice.allowed_tools.mode"),
        (in_chat("auto", chats("f"), chats("h")), "tool_choice.allowed_tools.tools[1]"),
        (in_chat("auto", {"type": "custom"}), "tool_choice.allowed_tools.tools[0]"),
        (in_chat("auto", 3), "tool_choice.allowed_tools.tools[0]"),
        (in_chat("auto", *[chats("f")] * 513), "tool_choice.allowed_tools.tools"),
    ],
)
def test_a_chats_choice_of_tools_is_obeyed_or_refused(choice: Any, place: str) -> None:
    assert param(CHAT, tools=CHAT_TOOLS, tool_choice=choice) == place


@each(
    "choice, place",
    [
        ("auto", ""),
        ("required", ""),
        (F, ""),
        ({**F, "name": "n__i"}, ""),
        ({**F, "name": "i"}, ""),
        ({"type": "custom", "name": "c"}, ""),
        ({**F, "function": {}, "allowed_tools": 3}, ""),
        ({**in_response("auto", F), "function": 3, "allowed_tools": 3}, ""),
        (in_response("required", F), ""),
        (in_response("required", F, {"type": "web_search"}), ""),
        (in_response("auto", {"type": "mcp", "server_label": "s"}), ""),
        ("wat", "tool_choice"),
        ({"type": "function", "function": {"name": "f"}}, "tool_choice.name"),
        ({**F, "name": "h"}, "tool_choice.name"),
        ({**F, "name": "n"}, "tool_choice.name"),
        ({"type": "web_search_preview"}, "tool_choice.type"),
        ({"type": "mcp", "server_label": "s"}, "tool_choice.type"),
        (in_response("required", {"type": "web_search"}), "tool_choice"),
        (in_response("auto", {"type": "mcp", "server_label": "t"}), "tool_choice.tools[0]"),
        (in_response("auto", F, {**F, "name": "h"}), "tool_choice.tools[1]"),
    ],
)
def test_a_responses_choice_of_tools_is_obeyed_or_refused(choice: Any, place: str) -> None:
    for path in (RESPONSES, INPUT_TOKENS):
        assert param(path, tools=TOOLS, tool_choice=choice) == place


@each(
    "choice, place",
    [
        (None, ""),
        ({"type": "auto", "disable_parallel_tool_use": True}, ""),
        ({"type": "any"}, ""),
        ({"type": "none"}, ""),
        ({"type": "tool", "name": "f"}, ""),
        ("auto", "tool_choice"),
        ({"type": "required"}, "tool_choice.type"),
        ({"name": "f"}, "tool_choice.type"),
        ({"type": "tool"}, "tool_choice.name"),
        ({"type": "tool", "name": "h"}, "tool_choice.name"),
    ],
)
def test_a_messages_choice_of_tools_is_obeyed_or_refused(choice: Any, place: str) -> None:
    tools = [{"name": "f", "input_schema": OBJECT, "cache_control": {"type": "ephemeral"}}]
    for path in ANTHROPIC:
        assert param(path, tools=tools, tool_choice=choice) == place
        assert param(path, tool_choice={"type": "any"}) == "tool_choice"


def test_what_anthropics_servers_would_do_beside_a_message_is_refused_or_named() -> None:
    for path in ANTHROPIC:
        for name in ("container", "mcp_servers", "output_format"):
            assert param(path, **{name: {"a": 1}}) == name
            assert param(path, **{name: None}) == ""
        body = {
            "model": "hermes-tiny",
            **BASE[path],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "context_management": {"edits": []},
            "betas": ["a"],
        }
        raw = json.dumps(body).encode()
        named = parse(path, raw, "hermes-tiny").ignored
        assert named == ["context_management", "betas", "thinking.budget_tokens"]


def test_the_arguments_of_a_call_may_have_any_fields() -> None:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": None}
    given = {"source": {"type": "url", "url": "http://10.0.0.1"}, "image_url": "http://10.0.0.1"}
    messages = [{"role": "assistant", "content": [{**call, "input": given}], "citations": None}]
    for path in ANTHROPIC:
        assert param(path, messages=messages) == ""


def test_what_is_not_there_cannot_be_called() -> None:
    assert param(RESPONSES, tools=[{"type": "web_search"}]) == ""
    assert param(RESPONSES, tools=[{"type": "web_search"}], tool_choice="required") == "tool_choice"
    assert param(RESPONSES, tool_choice={"type": "file_search"}) == "tool_choice.type"
    assert param(RESPONSES, tool_choice=in_response("auto", F)) == "tool_choice.tools[0]"
    assert param(CHAT, tool_choice=chats("f")) == "tool_choice.function.name"
    tools = {"type": "additional_tools", "role": "developer", "tools": TOOLS}
    assert param(RESPONSES, input=[{"role": "user", "content": "Hi"}, tools]) == "input[1].type"


@each(
    "wanted, place",
    [
        ({"type": "text"}, ""),
        ({"type": "json_object"}, ""),
        ({"type": "json_object", "schema": OBJECT}, ""),
        ({"type": "json_schema", "json_schema": {"schema": OBJECT}, "strict": True}, ""),
        ({"type": "structural_tag", "format": {}}, ""),
        ({"type": "json_object", "schema": "{}"}, "schema"),
        ({"type": "json_object", "json_schema": {"schema": OBJECT}}, "json_schema"),
        ({"type": "text", "schema": OBJECT}, "schema"),
        ({"type": "json_schema", "schema": OBJECT}, "schema"),
        ({"type": "json_schema", "json_schema": {"scheme": OBJECT}}, "json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": OBJECT}, "format": {}}, "format"),
    ],
)
def test_no_schema_of_a_format_is_dropped(wanted: dict[str, Any], place: str) -> None:
    for path in (CHAT, COMPLETIONS):
        found = param(path, response_format=wanted)
        assert found == (place and f"response_format.{place}")


@each(
    "text, place",
    [
        ({"format": {"type": "json_object", "schema": OBJECT}, "verbosity": "low"}, ""),
        ({"format": {"type": "json_schema", "name": "x", "schema": OBJECT}}, ""),
        ({"formt": {"type": "json_object"}}, "text.formt"),
        ({"schema": OBJECT}, "text.schema"),
        ({"format": {"type": "text", "schema": OBJECT}}, "text.format.schema"),
        (
            {"format": {"type": "json_schema", "json_schema": {"schema": OBJECT}}},
            "text.format.json_schema",
        ),
    ],
)
def test_no_format_of_a_responses_text_is_dropped(text: dict[str, Any], place: str) -> None:
    assert param(RESPONSES, text=text) == place


@each(
    "fields, wrong",
    [
        ({"paramters": OBJECT}, "paramters"),
        ({"input_schema": {"properties": {}}}, "input_schema"),
        ({"parameters": None, "schema": OBJECT}, "schema"),
        ({"parameters": OBJECT, "x": OBJECT}, ""),
        ({"output_schema": OBJECT}, ""),
        ({"metadata": {"a": 1}}, ""),
        ({}, ""),
    ],
)
def test_no_schema_of_a_function_is_dropped(fields: dict[str, Any], wrong: str) -> None:
    named = {"name": "f", **fields}
    found = param(CHAT, tools=[chats("g"), {"type": "function", "function": named}])
    assert found == (wrong and f"tools[1].function.{wrong}")
    found = param(RESPONSES, tools=[function("g"), {"type": "function", **named}])
    assert found == (wrong and f"tools[1].{wrong}")


def test_what_is_long_is_named_briefly() -> None:
    body = {"input": "Hi", "tools": TOOLS, "tool_choice": {**F, "name": "x" * 100_000}}
    with pytest.raises(RequestRefused) as caught:
        parse(RESPONSES, json.dumps(body).encode(), "hermes-tiny")
    assert len(caught.value.message) < 300
