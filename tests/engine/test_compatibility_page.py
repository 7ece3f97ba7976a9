"""What docs/compatibility.md says is answered otherwise than by OpenAI is what the service
answers: a request for each row of the table that the tests of its validation do not hold.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("vllm")

from serve_app.local.environment import ROOT
from tests.engine.both_ways import CHAT, COMPLETIONS, RESPONSES, usual
from tests.engine.resume_helpers import EngineThread
from tests.engine.test_both_ways import Started
from tests.journal.in_process import in_process, settings_of
from tests.tables import Failures

PAGE = (ROOT / "docs" / "compatibility.md").read_text()
NOT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Lima"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CALLED = {
    "tools": [{"type": "function", "name": "f", "parameters": CITY}],
    "tool_choice": "required",
    "max_output_tokens": 200,
}
BAD_WORDS = [f"{number:02d}" + "wonderful" * 3 for number in range(60)]
LEAST = {"min_tokens": 2}
OBJECT = {"type": "json_object", "schema": CITY}
ALLOWED = {
    "type": "allowed_tools",
    "mode": "required",
    "tools": [{"type": "function", "name": "f"}],
}
HOSTED = {"type": "web_search_preview"}
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": [PICTURE]}
COMPACT = "/v1/responses/compact"
FOREIGN = {"type": "compaction", "encrypted_content": "gAAAA"}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
PATCH = {"type": "custom", "name": "apply_patch", "format": GRAMMAR}
SEARCHED = {"type": "web_search_call", "status": "completed", "action": {"type": "search"}}
CLICKED = {"type": "computer_call_output", "call_id": "c", "output": {}}
ROWS: list[tuple[str, str, dict[str, Any], int, str]] = [
    ("an endpoint that the model cannot", "/v1/embeddings", {"input": "x"}, 404, "not_found"),
    ("what vLLM does not know of OpenAI's", CHAT, {"verbosity": "low"}, 200, ""),
    ("a text for a number or a boolean", CHAT, {"max_tokens": "64"}, 400, "invalid_request"),
    ("`64.0` for an integer", CHAT, {"max_tokens": 6.0}, 200, ""),
    ("a prompt and a `max_tokens`", CHAT, {"max_tokens": 2_040}, 400, "context_length_exceeded"),
    ("a prompt and a `max_tokens`", COMPLETIONS, {"prompt": [7] * 2_045}, 400, ""),
    ("a JSON schema with a keyword", CHAT, {"response_format": NOT}, 400, "invalid_request"),
    ("a function without `strict`", RESPONSES, CALLED, 200, ""),
    ("`bad_words` of more than 1,024", COMPLETIONS, {"bad_words": BAD_WORDS}, 400, ""),
    ("`bad_words` of more than 1,024", COMPLETIONS, {"bad_words": BAD_WORDS[:30]}, 200, ""),
    ("`bad_words` of more than 1,024", CHAT, {"stop_token_ids": [*range(113)], **LEAST}, 400, ""),
    ("`bad_words` of more than 1,024", CHAT, {"stop_token_ids": [*range(112)], **LEAST}, 200, ""),
    ("`response_format: json_object` with a", CHAT, {"response_format": OBJECT}, 200, ""),
    ("`response_format: json_object` with a", RESPONSES, {"text": {"format": OBJECT}}, 200, ""),
    ("`tool_choice: allowed_tools`", RESPONSES, {**CALLED, "tool_choice": ALLOWED}, 200, ""),
    ("`tool_choice` of a tool that is not", RESPONSES, {"tool_choice": HOSTED}, 400, ""),
    ("`POST /v1/responses/compact`", COMPACT, {"max_output_tokens": 4}, 200, ""),
    ("`POST /v1/responses/compact`", RESPONSES, {"input": [FOREIGN]}, 400, "invalid_request"),
    ("tools of the type `custom`", RESPONSES, {"tools": [PATCH]}, 200, ""),
    ("tools of the type `custom`", CHAT, {"tools": [PATCH]}, 400, "invalid_request"),
    ("calls of OpenAI's tools", RESPONSES, {"input": [SEARCHED]}, 200, ""),
    ("calls of OpenAI's tools", RESPONSES, {"input": [CLICKED]}, 400, "invalid_request"),
    ("a picture without `detail`", RESPONSES, {"input": [RESULT]}, 400, "invalid_request"),
]


async def ask_each(world: EngineThread, redis_url: str, namespace: str) -> None:
    settings = settings_of(redis_url, namespace, workers={"engine_stall_timeout_s": 600.0})
    async with in_process(settings, Started(world.engine)) as door:
        with Failures() as failures:
            for row, path, fields, status, code in ROWS:
                with failures.of(row, path):
                    assert f"\n| {row}" in PAGE
                    base = {"model": "hermes-tiny"} if path == "/v1/embeddings" else usual(path)
                    answer = await door.http.post(path, json={**base, **fields})
                    assert answer.status_code == status, answer.text
                    assert not code or answer.json()["error"]["code"] == code
                    if code == "context_length_exceeded":  # what LangChain looks for
                        assert answer.json()["error"]["message"].endswith(f"({code})")
                    if fields.get("input") == [RESULT]:  # it was read
                        assert "not a multimodal model" in answer.json()["error"]["message"]
                    if "tool_choice" in fields and status == 200:
                        (call,) = answer.json()["output"]
                        assert json.loads(call["arguments"]) == {"city": "Lima"}


def test_the_page_says_what_is_answered(
    world: EngineThread, redis_url: str, namespace: str
) -> None:
    world.run(ask_each(world, redis_url, namespace))
