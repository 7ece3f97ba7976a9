"""A format beside tools, and what cannot be obeyed: told by function or field, and by keyword."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

pytest.importorskip("vllm")

import jsonschema
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

from tests.engine.contents import events
from tests.engine.parameters import SCHEMA
from tests.engine.prompts import TOOLS
from tests.engine.resume_helpers import EngineThread, Written, attempts, request
from tests.tables import Failures

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASKED = "What is the weather in Bern?"
FORMATS: dict[str, dict[str, Any]] = {
    "json_schema": {"name": "x", "schema": SCHEMA},
    "json_object": {},
}
NAMED = {"type": "function", "function": {"name": "search"}}


def asking(path: str, tools: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """A request with tools, written as in chats."""
    common = {"model": "hermes-tiny", "temperature": 0, **fields}
    if path == CHAT:
        messages = [{"role": "user", "content": ASKED}]
        return {**common, "messages": messages, "tools": tools, "max_tokens": 160}
    flat = [{"type": "function", **tool["function"]} for tool in tools]
    return {**common, "input": ASKED, "tools": flat, "max_output_tokens": 160}


def shaped(path: str, kind: str) -> dict[str, Any]:
    """An answer's format."""
    inner = FORMATS[kind]
    if path == RESPONSES:
        return {"text": {"format": {"type": kind, **inner}}}
    return {"response_format": {"type": kind, **({kind: inner} if inner else {})}}


def strict(value: bool | None) -> list[dict[str, Any]]:
    more = {} if value is None else {"strict": value}
    return [{**tool, "function": {**tool["function"], **more}} for tool in TOOLS]


def said(path: str, written: Written) -> tuple[str, list[tuple[str, str]]]:
    """The text of an answer, and its calls: names and arguments."""
    assert written.attempt.failure is None, written.attempt.failure
    if not written.body.startswith(b"id: 1\n"):
        return _of_whole(path, json.loads(written.body))
    found = [json.loads(data) for _, data in events(written.body) if data != "[DONE]"]
    if path == RESPONSES:
        return _of_whole(path, found[-1]["response"])
    deltas = [choice["delta"] for event in found for choice in event["choices"]]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    names = [call["name"] for call in calls if call.get("name")]
    arguments = "".join(call.get("arguments") or "" for call in calls)
    text = "".join(delta.get("content") or "" for delta in deltas)
    return text, [(name, arguments) for name in names]


def _of_whole(path: str, answer: Any) -> tuple[str, list[tuple[str, str]]]:
    if path == CHAT:
        message = answer["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        return message["content"] or "", [(call["name"], call["arguments"]) for call in calls]
    output = answer["output"]
    texts = [part["text"] for item in output if "content" in item for part in item["content"]]
    calls = [item for item in output if item["type"] == "function_call"]
    return "".join(texts), [(call["name"], call["arguments"]) for call in calls]


def every_way() -> Iterator[tuple[str, str, bool, bool | None]]:
    yield from product((CHAT, RESPONSES), FORMATS, (False, True), (None, True, False))


def test_the_model_calls_or_answers_in_the_format(world: EngineThread) -> None:
    """It would call; where it cannot begin a call, it answers."""
    tokenizer = world.engine._engine.renderer.tokenizer
    begin = {str(tokenizer.encode(text)[0]): -100 for text in ("<", "<tool_call>")}
    bodies = [
        (path, kind, {**asking(path, strict(value), stream=stream), **shaped(path, kind), **more})
        for path, kind, stream, value in every_way()
        for more in ({}, {"logit_bias": begin})
    ]
    asked = [[request(path, body)] for path, _, body in bodies]
    with Failures() as failures:
        for (path, kind, body), done in zip(bodies, world.run(attempts(world, asked)), strict=True):
            with failures.of(
                path, kind, body.get("stream"), body["tools"][0], "logit_bias" in body
            ):
                text, calls = said(path, done)
                if "logit_bias" not in body:
                    ((name, arguments),) = calls
                    assert (name, text) == ("get_weather", "")
                    assert json.loads(arguments).keys() == {"city"}
                else:
                    assert not calls
                    wanted = SCHEMA if kind == "json_schema" else {"type": "object"}
                    if done.attempt.output_tokens < 160:
                        jsonschema.validate(json.loads(text), wanted)
                    assert text.startswith("{")


def test_a_choice_of_tools_beside_a_format_is_obeyed(world: EngineThread) -> None:
    """A call that is forced has no format; the one that is not allowed has no form."""
    rows = []
    for path, mode in product((CHAT, RESPONSES), ("auto", "required")):
        ref = NAMED if path == CHAT else {"type": "function", "name": "search"}
        allowed = {"mode": mode, "tools": [ref]}
        within = {"allowed_tools": allowed} if path == CHAT else allowed
        for choice, names in (
            ("none", []),
            ("required", ["get_weather"]),
            (ref, ["search"]),
            ({"type": "allowed_tools", **within}, ["search"]),
        ):
            body = {**asking(path, TOOLS, tool_choice=choice), **shaped(path, "json_schema")}
            rows.append((path, body, names))
    done = world.run(attempts(world, [[request(path, body)] for path, body, _ in rows]))
    with Failures() as failures:
        for (path, body, names), one in zip(rows, done, strict=True):
            with failures.of(path, body["tool_choice"]):
                text, calls = said(path, one)
                assert [name for name, _ in calls] == names
                assert bool(text) == (not names)


def test_structured_outputs_shape_all_that_the_model_writes(world: EngineThread) -> None:
    """They are vLLM's own, and no format: the markup of a call is a part of them."""
    said_so = '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'
    body = asking(CHAT, TOOLS, structured_outputs={"choice": [said_so]})
    (done,) = world.run(attempts(world, [[request(CHAT, body)]]))
    assert said(CHAT, done) == ("", [("search", '{"query": "x"}')])


def test_where_the_model_cannot_choose_that_is_told(
    world: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parsers of some models have no grammar for their calls."""
    monkeypatch.setattr(Hermes2ProToolParser, "structural_tag_model", None)
    asked = [
        [request(path, {**asking(path, TOOLS), **shaped(path, "json_object")})]
        for path in (CHAT, RESPONSES)
    ]
    for done in world.run(attempts(world, asked)):
        failure = done.attempt.failure
        assert failure is not None
        assert (failure.param, failure.status) == ("tool_choice", 400)
        assert "choose between a call and an answer" in failure.message


def tool_with(schema: Any, path: str) -> dict[str, Any]:
    made = {"name": "bad", "strict": True, "parameters": schema}
    tool = {"type": "function", **(made if path == RESPONSES else {"function": made})}
    return {"tools": [*asking(path, TOOLS[:1])["tools"], tool]}


PLACES: dict[str, tuple[str, Any]] = {
    "tools[1].function.parameters": (CHAT, lambda schema: tool_with(schema, CHAT)),
    "tools[1].parameters": (RESPONSES, lambda schema: tool_with(schema, RESPONSES)),
    "response_format.json_schema.schema": (
        CHAT,
        lambda schema: {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": schema},
            }
        },
    ),
    "response_format.schema": (
        COMPLETIONS,
        lambda schema: {"response_format": {"type": "json_object", "schema": schema}},
    ),
    "text.format.schema": (
        RESPONSES,
        lambda schema: {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
    ),
    "structured_outputs.json": (CHAT, lambda schema: {"structured_outputs": {"json": schema}}),
    "structured_outputs": (
        RESPONSES,
        lambda schema: {"structured_outputs": {"structural_tag": json.dumps(tag(schema))}},
    ),
    "response_format.format.content.json_schema": (
        CHAT,
        lambda schema: {"response_format": tag(schema)},
    ),
}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"type": "number", "multipleOf": 7}, "multipleOf"),
    ({"type": "string", "format": "wat"}, "format"),
    ({"type": "string", "pattern": "("}, "pattern"),
    ({"type": "string", "pattern": 3}, "pattern"),
    ({"type": "string", "pattern": "(.{0,8}){0,8}"}, "pattern"),
    ({"type": "object", "patternProperties": 3}, "patternProperties"),
    ({"type": "object", "required": [1]}, "required"),
    ({"type": "array", "items": 3}, "items"),
    ({"type": "array", "minItems": 3, "maxItems": 1}, "minItems"),
    ({"type": "wat"}, 'type "wat"'),
    ({"properties": []}, "properties"),
]


def tag(schema: Any) -> dict[str, Any]:
    inner = {"type": "json_schema", "json_schema": schema}
    return {
        "type": "structural_tag",
        "format": {"type": "tag", "begin": "<a>", "content": inner, "end": "</a>"},
    }


def test_a_schema_that_cannot_be_obeyed_is_named_with_its_keyword(world: EngineThread) -> None:
    rows = []
    for (inner, keyword), place in product(BAD, PLACES):
        path, made = PLACES[place]
        schema = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
        base = asking(path, [])
        del base["tools"]
        if path == COMPLETIONS:
            base = {"model": "hermes-tiny", "prompt": "x"}
        rows.append((place, keyword, path, {**base, **made(schema)}))
    done = world.run(attempts(world, [[request(path, body)] for *_, path, body in rows]))
    with Failures() as failures:
        for (place, keyword, path, _), one in zip(rows, done, strict=True):
            with failures.of(place, keyword, path):
                failure = one.attempt.failure
                assert failure is not None
                assert keyword in failure.message
                assert failure.param == place
                assert ("Function 'bad'" in failure.message) == ("tools" in place)


def test_a_function_is_strict_only_if_the_engine_can_read_its_schema(world: EngineThread) -> None:
    asked = [
        {"name": "bad", "parameters": {"type": "object", "properties": {"a": inner}}}
        for inner, _ in BAD
    ]
    bodies = [asking(RESPONSES, [{"type": "function", "function": one}]) for one in asked]
    done = world.run(attempts(world, [[request(RESPONSES, body)] for body in bodies]))
    with Failures() as failures:
        for body, one in zip(bodies, done, strict=True):
            with failures.of(body["tools"]):
                assert one.attempt.failure is None
