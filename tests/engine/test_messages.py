"""Anthropic's messages on the real engine: both ways the same, the limit cut to the context, and
counted as they are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")

from pydantic import TypeAdapter

from serve_app.contract import MESSAGE, MESSAGE_TOKENS
from tests.engine.answers import told
from tests.engine.prompts import TOOLS
from tests.engine.resume_helpers import EngineThread, Written, attempt, request
from tests.tables import Failures

LONGEST = 2048
WEATHER = "What is the weather in Bern?"
FUNCTIONS = [
    {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
    for one in (tool["function"] for tool in TOOLS)
]
PICTURE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def asked(world: EngineThread, content: Any = "Hello", path: str = MESSAGE, **more: Any) -> Written:
    messages = content if isinstance(content, list) else [user(content)]
    usual = {"temperature": 0, "max_tokens": 8} if path == MESSAGE else {}
    body = {"model": "hermes-tiny", "messages": messages, **usual, **more}
    return world.run(attempt(world, [request(path, body)]))


def counted(world: EngineThread, content: Any, **more: Any) -> int:
    return int(json.loads(asked(world, content, MESSAGE_TOKENS, **more).body)["input_tokens"])


def made_of(body: bytes) -> dict[str, Any]:
    """The message that a stream makes, as Anthropic's SDKs do it."""
    message: dict[str, Any] = {}
    arguments: dict[int, str] = {}
    for event in told(body):
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                message["content"].append(event["content_block"])
            case "content_block_delta":
                at, delta = event["index"], event["delta"]
                (name,) = delta.keys() - {"type"}
                if name == "partial_json":
                    arguments[at] = arguments.get(at, "") + delta[name]
                else:
                    block = message["content"][at]
                    block[name] = block.get(name, "") + delta[name]
            case "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
    for at, text in arguments.items():
        parsed = TypeAdapter(Any).validate_json(text, experimental_allow_partial=True)
        message["content"][at]["input"] = parsed
    return message


@pytest.mark.parametrize(
    ("content", "more", "ended"),
    [
        ("Hello", {}, "max_tokens"),
        ("Count to ten.", {"stop_sequences": ["four"], "max_tokens": 60}, "stop_sequence"),
        (WEATHER, {"tools": FUNCTIONS, "max_tokens": 120}, "tool_use"),
        (WEATHER, {"tools": FUNCTIONS, "max_tokens": 120, "tool_choice": {"type": "any"}}, ""),
        *(
            (WEATHER, {"tools": FUNCTIONS, "max_tokens": limit}, "max_tokens")
            for limit in (3, 14, 30, 45)
        ),
    ],
)
def test_streamed_equals_unstreamed(
    world: EngineThread, content: str, more: dict[str, Any], ended: str
) -> None:
    whole = json.loads(asked(world, content, **more).body)
    streamed = asked(world, content, stream=True, **more)
    *_, last = told(streamed.body)
    assert last == {"type": "message_stop"}
    assert b"[DONE]" not in streamed.body
    assert made_of(streamed.body) == whole
    assert (whole["type"], whole["role"], whole["id"]) == ("message", "assistant", "msg_req_0")
    assert whole["stop_reason"] == (ended or whole["stop_reason"])
    assert whole["stop_sequence"] == ("four" if ended == "stop_sequence" else None)
    assert whole["usage"]["output_tokens"] > 0
    assert "<tool" not in str(whole)


def test_the_limit_of_an_answer_is_cut_to_what_the_prompt_leaves(world: EngineThread) -> None:
    word = counted(world, "ab") - counted(world, "a")
    room = LONGEST - counted(world, "")
    text = "a" * (room // word - 5)
    for limit in (64_000, 2_000):
        answer = json.loads(asked(world, text, max_tokens=limit).body)
        assert answer["stop_reason"] in ("max_tokens", "end_turn")
        assert 0 < answer["usage"]["output_tokens"] <= 5 * word + word
    for path, length in ((MESSAGE, room), (MESSAGE, 4 * room), (MESSAGE_TOKENS, 4 * room)):
        failure = asked(world, "a" * length, path).attempt.failure
        assert failure is not None
        assert failure.reason == "context_length_exceeded"
        found = re.search(r"^prompt is too long: (\d+) tokens > (\d+) maximum", failure.message)
        assert found, failure.message
        assert int(found[1]) > int(found[2]) == LONGEST - 1


def test_an_error_is_in_anthropics_words(world: EngineThread) -> None:
    for stream in (False, True):
        done = asked(world, [user([{"type": "image", "source": PICTURE}])], stream=stream)
        assert done.attempt.head is not None
        assert done.attempt.head.status == 400
        error = json.loads(done.body)["error"]
        assert error["type"] == "invalid_request_error"
        assert "not a multimodal model" in error["message"]


def test_thinking_is_not_enforced_and_can_be_turned_off(world: EngineThread) -> None:
    budget = {"type": "enabled", "budget_tokens": 1024}
    plain = json.loads(asked(world, max_tokens=1_030, stop_sequences=["e"]).body)
    more: dict[str, Any] = {"max_tokens": 1_030, "stop_sequences": ["e"]}
    assert json.loads(asked(world, thinking=budget, **more).body) == plain
    assert asked(world, thinking={"type": "disabled"}, **more).attempt.failure is None


def generated(many: int) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Random conversations with blocks of all kinds, tools and system prompts."""
    chance = Random("messages")

    def text() -> str:
        return "".join(chance.choices('ab é漢🦊\n{}<>"', k=chance.randint(1, 40)))

    def block() -> dict[str, Any]:
        return {"type": "text", "text": text(), "cache_control": {"type": "ephemeral"}}

    for _ in range(many):
        messages = [user(text())]
        for turn in range(chance.randint(0, 4)):
            call = {"type": "tool_use", "id": f"c{turn}", "name": "search", "input": {"q": text()}}
            thought = {"type": "thinking", "thinking": text(), "signature": "x"}
            found = chance.choice([text(), [{"type": "text", "text": text()}]])
            result = {"type": "tool_result", "tool_use_id": f"c{turn}", "content": found}
            messages += [
                {"role": "assistant", "content": [thought, block(), call][chance.randint(0, 2) :]},
                user([result, block()]),
            ]
        more: dict[str, Any] = {}
        if chance.random() < 0.5:
            more["system"] = chance.choice([text(), [block(), block()]])
        if chance.random() < 0.5:
            more["tools"] = chance.sample(FUNCTIONS, chance.randint(1, 3))
            kinds = [{"type": "auto"}, {"type": "none"}, {"type": "tool", "name": ""}]
            more["tool_choice"] = {**chance.choice(kinds)}
            if "name" in more["tool_choice"]:
                more["tool_choice"]["name"] = more["tools"][0]["name"]
        if chance.random() < 0.3:
            more["thinking"] = {"type": chance.choice(["disabled", "adaptive"])}
        yield messages, more


@pytest.mark.parametrize("many", [40, pytest.param(1_000, marks=pytest.mark.nightly)])
@pytest.mark.timeout(900)
def test_as_many_tokens_are_counted_as_a_message_reads(world: EngineThread, many: int) -> None:
    with Failures() as failures:
        for messages, more in generated(many):
            with failures.of(messages, more):
                usage = json.loads(asked(world, messages, max_tokens=1, **more).body)["usage"]
                read = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
                assert counted(world, messages, **more) == read
