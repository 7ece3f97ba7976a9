"""Generated requests, valid ones and broken ones, for each path that answers in a stream."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from tests.engine.prompts import TOOLS

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER: dict[str, Any] = {"role": "user", "content": "Hello"}
LONG = "hello " * 5_000
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PARAMETERS = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
FUNCTION = {"name": "f", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
    {"enum": ["a", "b"]},
    {"type": "wat"},
    {"$ref": "#"},
    {"type": "string", "minLength": -1},
    {"type": "number", "multipleOf": -1},
    {"type": "integer", "minimum": 0, "exclusiveMinimum": True},
    {"type": "string", "pattern": "^a{1000}$"},
    "no schema",
    None,
]


def _format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def _answered(*parts: Any, **more: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": list(parts), **more}, USER]


SAMPLING: dict[str, list[Any]] = {
    "temperature": [0, 0.7, None, 3, "hot"],
    "top_p": [0.5, None, 0, [1]],
    "seed": [7, None, 2**63, "x"],
    "user": ["a", None, 3],
    "metadata": [{"a": "b"}, None, 3],
    "service_tier": ["auto", None, "wat"],
    "stop": ["e", ["a", "b"], None, "", 3, ["a", 3]],
    "logit_bias": [{"97": 5}, None, {"100000": 1}, {"a": 1}],
    "top_k": [5, None, -2],
    "presence_penalty": [0.5, None, 9],
    "unknown": [1, None, {}],
}
FIELDS: dict[str, dict[str, list[Any]]] = {
    CHAT: {
        **SAMPLING,
        "messages": [
            [],
            "Hello",
            [{"role": "wat", "content": "x"}],
            [{"role": "user", "content": 3}],
            [{"role": "user", "content": [{"type": "wat"}]}],
            [{"role": "user", "content": [{"type": "text", "text": 3}]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": None}]}],
            [{"role": "user", "content": LONG}],
            [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
            [USER, {"role": "assistant", "content": "x", "tool_calls": None, "audio": None}, USER],
            [USER, {"role": "assistant", "tool_calls": 3}, USER],
            [USER, {"role": "assistant", "tool_calls": [{"type": "function"}]}, USER],
            _answered({"type": "refusal", "refusal": "No."}),
        ],
        "max_tokens": [1, 16.0, 0, "many", 5_000, 4_090],
        "n": [2, None, 0, 200],
        "tools": [[TOOL], None, [], "x", [{"type": "custom"}], [{"type": "function"}]],
        "tool_choice": ["auto", None, "wat", "required", {"type": "function"}],
        "response_format": [{"type": "text"}, None, {"type": "wat"}, *map(_format, SCHEMAS)],
        "structured_outputs": [
            *({"choice": ["a"]}, {"regex": "("}, {"grammar": "wat"}, {}),
            {"grammar": "root ::= (root)+ ([a-z] a)+\na ::= root | [a-z]\n"},
        ],
        "logprobs": [True, None, "x"],
        "top_logprobs": [1, None, 30],
        "reasoning_effort": ["low", None, "wat"],
        "chat_template_kwargs": [{}, None, "x"],
    },
    COMPLETIONS: {
        **SAMPLING,
        "prompt": [[1, 2], ["a", "b"], LONG, [7] * 4_096, [], [[]], "", 3, None, ["a", 3], [10**6]],
        "max_tokens": [1, 0, "many", 5_000, 4_096],
        "logprobs": [1, None, 30, "x"],
        "echo": [True, None, "x"],
        "suffix": ["x", None],
        "best_of": [1, None, 0],
        "response_format": [{"type": "text"}, *map(_format, SCHEMAS)],
        "structured_outputs": [{"choice": ["a", "b"]}, {"regex": "("}],
    },
    RESPONSES: {
        **SAMPLING,
        "input": [
            LONG,
            [],
            3,
            [USER],
            [{"content": "x"}],
            [{"role": "wat", "content": "x"}],
            [{"role": "user", "content": [{"type": "wat"}]}],
            [{"type": "wat"}] * 3,
            _answered({"type": "output_text", "text": "x"}),
            _answered({"type": "refusal", "refusal": "No."}),
            _answered({"type": "refusal", "refusal": "No."}, type="message", id="m", status=None),
            _answered(),
            [{"type": "item_reference", "id": "m"}],
            [{"type": "reasoning", "id": "r", "summary": [], "content": None}, USER],
        ],
        "max_output_tokens": [1, 16.0, 0, 5_000, 4_090],
        "truncation": ["auto", "disabled", None, "wat"],
        "tools": [[{**FUNCTION, "type": "function"}], None, [TOOL], "x", [{"type": "wat"}]],
        "tool_choice": ["auto", None, "wat", "required"],
        "text": [{"format": {"type": "text"}}, None, {"format": {"type": "wat"}}]
        + [{"format": {**_format(one)["json_schema"], "type": "json_schema"}} for one in SCHEMAS],
        "include": [[], None, ["wat"]],
        "instructions": ["Be brief.", None, 3],
        "previous_response_id": [None, "resp_1"],
        "background": [False, None, 3],
        "parallel_tool_calls": [False, None, 3],
        "reasoning": [{"effort": "low", "summary": None}, None, {"effort": "wat"}],
        "store": [False, None],
    },
}


WEATHER: dict[str, Any] = {"role": "user", "content": "What is the weather in Bern?"}
GET_WEATHER: dict[str, Any] = TOOLS[0]["function"]
_PREFILL = {"continue_final_message": True, "add_generation_prompt": False, "echo": True}
_CHOICES: list[Any] = [
    *("auto", "required", "none"),
    {"type": "function", "function": {"name": "get_weather"}},
]
CUT_CALLS: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {"messages": [WEATHER], "tools": tools, "tool_choice": choice, "max_tokens": limit}
        for tools in (TOOLS, [{"type": "function", "function": {**GET_WEATHER, "strict": True}}])
        for choice in _CHOICES
        for limit in (3, 14, 30, 45)
    ],
    RESPONSES: [
        {
            "input": WEATHER["content"],
            "tools": [{"type": "function", **GET_WEATHER}],
            "tool_choice": choice if isinstance(choice, str) else {**GET_WEATHER, **choice},
            "max_output_tokens": limit,
        }
        for choice in _CHOICES
        for limit in (3, 14, 30, 45)
    ],
}
"""Tool calls that the limit cuts: in their markup, their name, before and in their arguments."""
_COUNT, _LETTERS = "Count to ten.", {"structured_outputs": {"choice": ["é🦊漢 a"]}}
ENDS: list[dict[str, Any]] = [
    {},
    _LETTERS,
    {**_LETTERS, "skip_special_tokens": False},
    {**_LETTERS, "skip_special_tokens": False, "include_stop_str_in_output": True},
    {**_LETTERS, "stop": ["漢"]},
    {**_LETTERS, "stop": ["漢"], "include_stop_str_in_output": True},
    {"stop": ["four"]},
    {"stop": ["four"], "include_stop_str_in_output": True},
    {"stop": ["seven eleven nine", "o, "]},
    {"stop": ["it never comes"]},
    {"stop_token_ids": [116]},
    {"stop_token_ids": [116], "include_stop_str_in_output": True},
]
"""How an answer to `_COUNT` ends, or is held back."""


def _with_logprobs(path: str) -> list[dict[str, Any]]:
    """Requests for the log probabilities of each token."""
    asked: dict[str, Any] = {
        CHAT: {
            "messages": [{"role": "user", "content": _COUNT}],
            "logprobs": True,
            "top_logprobs": 1,
            "max_tokens": 40,
        },
        COMPLETIONS: {"prompt": _COUNT, "logprobs": 1, "max_tokens": 40},
        RESPONSES: {
            "input": _COUNT,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
            "max_output_tokens": 40,
        },
    }[path]
    ignored = {"ignore_eos": True, **asked}
    if path == COMPLETIONS:
        ignored["echo"] = True
    return [*({**asked, **end} for end in ENDS), ignored]


_SOON: dict[str, Any] = {"stop": ["e"]}  # else the answer fills the context
TOGETHER: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        *CUT_CALLS[CHAT],
        *_with_logprobs(CHAT),
        {"max_tokens": None, **_SOON},
        {"messages": [WEATHER], "tools": TOOLS, "max_tokens": 90, "stop": ['ity"']},
        {"messages": [WEATHER], "tools": TOOLS, "max_tokens": 90},
        *(
            {"messages": [USER, {"role": "assistant", "content": content}], **_PREFILL, **more}
            for content in ("OK", "\u2028", "", [{"type": "text", "text": t} for t in "ab"])
            for more in ({}, {"return_token_ids": True, "logprobs": True})
        ),
        {"messages": [USER], "add_generation_prompt": False, "echo": True},
    ],
    COMPLETIONS: [
        {"prompt": ["a", "b"], "echo": True, "return_token_ids": True},
        *_with_logprobs(COMPLETIONS),
        {"max_tokens": None, **_SOON},
    ],
    RESPONSES: [
        *CUT_CALLS[RESPONSES],
        *_with_logprobs(RESPONSES),
        {"max_output_tokens": None, **_SOON},
        {"input": WEATHER["content"], "tools": CUT_CALLS[RESPONSES][0]["tools"], "stop": ["City"]},
    ],
}
"""What is made in ways of its own, streamed and not."""


def usual(path: str) -> dict[str, Any]:
    """A request that is answered with a few tokens."""
    asked: dict[str, Any] = {"model": "hermes-tiny", "temperature": 0}
    if path == CHAT:
        return {**asked, "messages": [USER], "max_tokens": 6}
    if path == COMPLETIONS:
        return {**asked, "prompt": "Hello", "max_tokens": 6}
    return {**asked, "input": "Hello", "max_output_tokens": 6}


def generated(each_path: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Path and body: every value of every field alone, several fields together, and `TOGETHER`."""
    for path, fields in FIELDS.items():
        alone = [{name: value} for name, values in fields.items() for value in values]
        random = Random(path)
        while len(alone) < each_path:
            names = random.sample(sorted(fields), random.randint(2, 3))
            alone.append({name: random.choice(fields[name]) for name in names})
        yield from ((path, {**usual(path), **one}) for one in (*alone, *TOGETHER[path]))
