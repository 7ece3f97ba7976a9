"""What vLLM's Responses lack by themselves: earlier responses, truncation by items, counting."""

from __future__ import annotations

from typing import Any

import msgspec

from serve_app.contract import COMPACT, INPUT_TOKENS, RESPONSES
from tests.engine.answers import choices, told
from tests.engine.prompts import TOOLS
from tests.engine.resume_helpers import EngineThread, Written, attempt, request
from tests.tables import Failures, each
from workers.request_body import _BEFORE, opened, sealed

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


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits", "format": GRAMMAR}
INNER = {"type": "function", "name": "spawn", "parameters": {"type": "object"}, "strict": False}
NAMESPACE = {"type": "namespace", "name": "agents", "description": "Agents", "tools": [INNER]}
AGENTS = [PATCH, NAMESPACE, {"type": "web_search"}, {"type": "local_shell"}]
PARTS = [{"type": "input_text", "text": "the coast"}]
DONE: dict[str, Any] = {"status": "completed"}
SEARCHED = {"type": "search", "query": "q"}
HISTORIES: list[tuple[str, list[dict[str, Any]]]] = [
    ("a call whose arguments are no JSON", [{**CALL, "arguments": '{"a": '}, RESULT]),
    ("a call without arguments", [{**CALL, "arguments": ""}, RESULT]),
    ("a call without its output", [CALL]),
    ("an output without its call", [RESULT]),
    ("an output in parts", [CALL, {**RESULT, "output": PARTS}]),
    ("calls in parallel", [CALL, {**CALL, "call_id": "c2"}, RESULT, {**RESULT, "call_id": "c2"}]),
    ("a call in a namespace", [{**CALL, "name": "spawn", "namespace": "agents"}, RESULT]),
    (
        "a call of a custom tool",
        [
            {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** B"},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": PARTS},
        ],
    ),
    (
        "a local shell",
        [
            {
                **{"type": "local_shell_call", "call_id": "c1", **DONE},
                "action": {"type": "exec", "command": ["ls"]},
            },
            RESULT,
        ],
    ),
    ("a search without an id", [{"type": "web_search_call", **DONE, "action": SEARCHED}]),
    ("a thought without an id", [{"type": "reasoning", "summary": [], "content": None}]),
    ("a thought that is sealed", [{**THOUGHT, "content": None, "encrypted_content": sealed("x")}]),
    ("a thought of another service", [{**THOUGHT, "encrypted_content": "gAAAA"}, CALL, RESULT]),
    (
        "a message with a phase",
        [{**SAID, "phase": "commentary"}, {**SAID, "phase": "final_answer"}],
    ),
    ("an answer without an id", [{k: v for k, v in SAID.items() if k not in ("id", "status")}]),
    ("a developer's message", [{"type": "message", "role": "developer", "content": PARTS}]),
    ("a compaction", [{"type": "compaction", "encrypted_content": sealed("x")}]),
]


def test_what_agents_send_is_read(world: EngineThread) -> None:
    """With what Codex has in its requests beside it."""
    more = {
        **{"tools": AGENTS, "tool_choice": "auto", "parallel_tool_calls": False, "store": False},
        **{"include": ["reasoning.encrypted_content"], "prompt_cache_key": "k"},
        **{"reasoning": {"effort": "high", "summary": "auto"}, "text": {"verbosity": "low"}},
        **{"service_tier": "priority", "max_output_tokens": 4, "stream": True},
    }
    with Failures() as failures:
        for name, items in HISTORIES:
            items = [{**one, "internal_chat_message_metadata_passthrough": {}} for one in items]
            with failures.of(name):
                done = asked(world, RESPONSES, [user("Where?"), *items], **more)
                assert done.attempt.failure is None, done.attempt.failure


@each(
    "item",
    [
        {"type": "compaction", "encrypted_content": "gAAAA"},
        {"type": "compaction"},
        {"type": "wat"},
        {"type": "computer_call_output", "call_id": "c", "output": {}},
    ],
)
def test_what_nobody_can_read_is_refused_in_words(world: EngineThread, item: Any) -> None:
    for path in (RESPONSES, COMPACT):
        done = asked(world, path, [user("Where?"), item])
        assert done.attempt.failure is not None
        assert done.attempt.failure.reason == "invalid_request", done.attempt.failure
        assert "input" in str(done.attempt.failure.param), done.attempt.failure


def test_a_conversation_is_compacted_and_goes_on(world: EngineThread) -> None:
    turns = [user("Where?"), SAID, CALL, RESULT, user("Why?")]
    done = asked(world, COMPACT, turns, max_output_tokens=12, tools=AGENTS)
    made = msgspec.json.decode(done.body)
    assert made["object"] == "response.compaction"
    *users, compaction = made["output"]
    assert [one["content"][0]["text"] for one in users] == ["Where?", "Why?"]
    assert compaction["type"] == "compaction"
    summary = opened(compaction["encrypted_content"])
    assert summary
    assert made["usage"]["output_tokens"] == 12
    whole = {"temperature": 0, "max_output_tokens": 12, "tools": AGENTS}
    for stream in (False, True):
        given = [*turns, {"type": "compaction_trigger"}]
        done = asked(world, RESPONSES, given, stream=stream, **whole)
        status, _, *items = choices(RESPONSES, done.body)
        assert (status, [one["type"] for one in items]) == ("incomplete", ["compaction"])
        assert items[0]["encrypted_content"] == compaction["encrypted_content"]
        if stream:
            follow(list(told(done.body)))
    told_again = {"type": "message", "role": "user", "content": f"{_BEFORE}{summary}"}
    shown = [user("Where?"), user("Why?"), told_again, user("And?")]
    assert tokens(world, [*made["output"], user("And?")]) == tokens(world, shown)
    assert tokens(world, [*turns, compaction, user("And?")]) == tokens(world, shown)


def follow(events: list[dict[str, Any]]) -> None:
    """Check that a stream is whole: numbers without a gap, each item added once and done once, its
    pieces joined are what its end says, and its items are those of the response.
    """
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    kinds = [one["type"] for one in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    ended = events[-1]["response"]
    items: list[Any] = []
    assert kinds[-1] == f"response.{ended['status']}"
    said = ""
    for one in events[2:-1]:
        _, *what = one["type"].split(".")
        assert one["output_index"] == len(items), one
        match what:
            case ["output_item", "added"]:
                added = one["item"]
                said = ""
            case ["output_item", "done"]:
                assert one["item"]["id"] == added["id"]
                items.append(one["item"])
            case ["content_part", _]:
                assert one["item_id"] == added["id"]
            case [_, "delta"]:
                assert one["item_id"] == added["id"]
                said += one["delta"]
            case [_, "done"]:
                whole = next(one[name] for name in ("text", "arguments", "input") if name in one)
                assert whole == said
            case _:
                raise AssertionError(one)
    assert items == ended["output"]


def test_the_events_of_a_stream_are_complete(world: EngineThread) -> None:
    thinking = EngineThread(core=world, reasoning_parser="deepseek_r1")
    weather, think = "What is the weather in Bern?", "Think step by step before you answer."
    tools = [{"type": "function", **TOOLS[0]["function"]}, PATCH, NAMESPACE]
    sealing = {"include": ["reasoning.encrypted_content"], "instructions": think, "tools": []}
    custom = {"tool_choice": {"type": "custom", "name": "apply_patch"}}
    inner = {"tool_choice": {"type": "function", "name": "agents__spawn"}}
    for engine, given, fields, kinds in (
        (world, "Hello", {}, ["message"]),
        (world, weather, {}, ["function_call"]),
        (world, weather, {"max_output_tokens": 45}, ["function_call"]),
        (world, "Hello", custom, ["custom_tool_call"]),
        (world, "Hello", {**custom, "max_output_tokens": 30}, ["custom_tool_call"]),
        (world, "Hello", {**inner, "max_output_tokens": 60}, ["function_call"]),
        (thinking, "What is a river?", sealing, ["reasoning", "message"]),
        (thinking, "What is a river?", {**sealing, "max_output_tokens": 8}, ["reasoning"]),
    ):
        usual = {"tools": tools, "max_output_tokens": 200, **fields}
        done = asked(engine, RESPONSES, given, stream=True, **usual)
        events = list(told(done.body))
        follow(events)
        output = events[-1]["response"]["output"]
        assert [one["type"] for one in output] == kinds
        for one in output:
            if one["type"] == "reasoning":
                assert opened(one["encrypted_content"]) == one["content"][0]["text"]
            if one["type"] == "custom_tool_call":
                assert '"input"' not in one["input"]
            if fields.get("tool_choice") == inner["tool_choice"]:
                assert (one["namespace"], one["name"]) == ("agents", "spawn")
        if "max_output_tokens" not in fields:  # where a cut is shown depends on the pieces
            whole = asked(engine, RESPONSES, given, **usual)
            assert choices(RESPONSES, whole.body) == choices(RESPONSES, done.body)
