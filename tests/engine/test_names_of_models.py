"""vLLM's answers call the model as their requests did, in every attempt."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engine.resume_helpers import EngineThread, attempt, request
from tests.tables import each

ALIAS = 'claude-"ö"/5'
GREEDY = {"model": "hermes-tiny", "temperature": 0, "ignore_eos": True}
LIMIT = {"max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], **LIMIT}


@each("stream", [False, True])
@each(
    "path, body",
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "Hello", **LIMIT}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 4}),
    ],
)
def test_an_answer_calls_the_model_as_its_request_did(
    world: EngineThread, path: str, body: dict[str, Any], stream: bool
) -> None:
    written = world.run(
        attempt(world, [request(path, {**GREEDY, **body, "stream": stream}, alias=ALIAS)])
    )
    named = b'"model":' + json.dumps(ALIAS, ensure_ascii=False).encode()
    assert written.body.count(named) == written.body.count(b'"model":') > 0
    resumed = world.run(attempt(world, written.entries[:4]))
    assert (resumed.body, resumed.generated_tokens < 4) == (written.body, True)
