"""What vLLM's Responses lack by themselves: earlier responses, truncation by items, counting."""

from __future__ import annotations

from typing import Any

import msgspec

from serve_app.contract import INPUT_TOKENS, RESPONSES
from tests.engine.answers import choices, told
from tests.engine.prompts import TOOLS
from tests.engine.resume_helpers import EngineThread, Written, attempt, request

LONGEST = 2048
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "id": "fc_1"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "the coast"}
THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "It is by the sea."}],
    "encrypted_content": None,
    "status": None,
}
SAID = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "phase": None,
    "content": [
        {"type": "output_text", "text": "At the coast.", "annotations": [], "logprobs": []}
    ],
}


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def asked(world: EngineThread, path: str, given: Any, **fields: Any) -> Written:
    body = {"model": "hermes-tiny", "input": given, "temperature": 0, **fields}
    return world.run(attempt(world, [request(path, body)]))


def answered(world: EngineThread, given: Any, **fields: Any) -> Any:
    done = asked(world, RESPONSES, given, **{"max_output_tokens": 8, **fields})
    return msgspec.json.decode(done.body)


def tokens(world: EngineThread, given: Any, **fields: Any) -> int:
    done = asked(world, INPUT_TOKENS, given, **fields)
    if done.attempt.failure is not None:
        assert done.attempt.failure.reason == "context_length_exceeded"
        return LONGEST
    found = msgspec.json.decode(done.body)
    assert found["object"] == "response.input_tokens"
    return int(found["input_tokens"])


def test_what_a_response_has_said_is_taken_as_input(world: EngineThread) -> None:
    """As the ingress puts it there; a plain text of the assistant gives the same prompt."""
    turns = [user("Where?"), SAID, user("Why?")]
    whole = answered(world, turns, previous_response_id="resp_1")
    plain = [turns[0], {"role": "assistant", "content": "At the coast."}, turns[2]]
    same = answered(world, plain)
    assert whole["output"][0]["content"] == same["output"][0]["content"]
    assert whole["usage"] == same["usage"]
    assert (whole["previous_response_id"], same["previous_response_id"]) == ("resp_1", None)
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    called = answered(world, [turns[0], THOUGHT, CALL, RESULT], tools=tools)
    without = answered(world, [turns[0]], tools=tools)
    assert called["usage"]["input_tokens"] > without["usage"]["input_tokens"]


def test_a_response_names_what_vllm_leaves_out(
    world: EngineThread,
) -> None:
    said = {"prompt_cache_key": "a key", "safety_identifier": "somebody"}
    answer = answered(world, "Where?", **said)
    assert {name: answer[name] for name in said} == said
    assert "safety_identifier" not in answered(world, "Where?"), "its bytes are as they were"


def test_the_tokens_of_an_input_are_those_that_a_response_reads(world: EngineThread) -> None:
    for given, fields in (
        ("Where?", {}),
        ([user("Where?"), SAID, user("Why?")], {"instructions": "Be brief."}),
    ):
        read = answered(world, given, **fields)["usage"]["input_tokens"]
        assert tokens(world, given, **fields) == read


def test_an_input_that_is_too_long_loses_its_oldest_items(world: EngineThread) -> None:
    said = {"type": "message", "role": "developer", "content": "Speak like a pirate."}
    turns = [item for n in range(7) for item in (user(f"{n} " + "word " * 400), SAID)]
    given = [turns[0], said, CALL, RESULT, *turns[1:], user("Why?")]
    refused = asked(world, RESPONSES, given, max_output_tokens=8)
    assert refused.attempt.failure is not None
    assert refused.attempt.failure.reason == "context_length_exceeded"
    cut = answered(world, given, truncation="auto", max_output_tokens=100)
    assert cut["truncation"] == "auto"
    fits = next(
        rest
        for begin in range(1, len(given))
        if given[begin] is not RESULT
        and tokens(world, rest := [*([said] if begin > 1 else []), *given[begin:]]) <= LONGEST - 100
    )
    same = answered(world, fits, max_output_tokens=100)
    assert same["usage"]["input_tokens"] == cut["usage"]["input_tokens"]
    assert same["output"][0]["content"] == cut["output"][0]["content"]
    short = [user("Where?"), SAID, user("Why?")]
    assert answered(world, short, truncation="auto")["usage"] == answered(world, short)["usage"]


def test_one_item_that_is_too_long_is_refused(world: EngineThread) -> None:
    for given in ("word " * 3_000, [user("Hi"), user("word " * 3_000)]):
        done = asked(world, RESPONSES, given, truncation="auto")
        assert done.attempt.failure is not None
        assert done.attempt.failure.reason == "context_length_exceeded"


def test_what_the_limit_or_a_stop_text_cuts_is_incomplete(world: EngineThread) -> None:
    thinking = EngineThread(core=world, reasoning_parser="deepseek_r1")
    weather = "What is the weather in Bern?"
    tools = [{"type": "function", **TOOLS[0]["function"]}]
    think = "Think step by step before you answer."
    call, text, thought = "function_call", "message", "reasoning"
    for engine, given, fields, status, items in (
        (world, "Hello", {"max_output_tokens": 8}, "incomplete", {text: "incomplete"}),
        (world, weather, {"tools": tools, "max_output_tokens": 14}, "incomplete", {}),
        (
            world,
            weather,
            {"tools": tools, "max_output_tokens": 45},
            "incomplete",
            {call: "incomplete"},
        ),
        # Its arguments are whole, its markup is not.
        (
            world,
            weather,
            {"tools": tools, "max_output_tokens": 62},
            "incomplete",
            {call: "completed"},
        ),
        (world, weather, {"tools": tools, "stop": ["City"]}, "completed", {call: "incomplete"}),
        (world, weather, {"tools": tools}, "completed", {call: "completed"}),
        (
            thinking,
            "What is a river?",
            {"instructions": think, "max_output_tokens": 8},
            "incomplete",
            {thought: "incomplete"},
        ),
    ):
        for stream in (False, True):
            done = asked(engine, RESPONSES, given, stream=stream, **fields)
            its_status, _, *made = choices(RESPONSES, done.body)
            assert (its_status, {one["type"]: one["status"] for one in made}) == (status, items)
            if stream:
                ended = [
                    one["item"] for one in told(done.body) if one["type"].endswith("item.done")
                ]
                assert {one["type"]: one["status"] for one in ended} == items
