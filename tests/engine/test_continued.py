"""A greedy answer that yields its place three times equals the unbroken one, and the worker says
which answers can be continued.

The engine, vLLM's own serving layer and the journal entries are real; only Redis is missing.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("vllm")

from serve_app.journal.yielding import yield_of
from tests.engine.contents import same
from tests.engine.resume_helpers import EngineThread, Written, attempt, request

CHAT = "/v1/chat/completions"


def chat(**more: Any) -> dict[str, Any]:
    return {
        "model": "hermes-tiny",
        "messages": [{"role": "user", "content": "Tell me a story about a lighthouse."}],
        "temperature": 0,
        "max_tokens": 120,
        "ignore_eos": True,
        **more,
    }


def token_ids(written: Written) -> list[int]:
    """All tokens of an answer, in order."""
    found = (json.loads(entry.fields.get(b"o", b"[]")) for entry in written.entries)
    return [token_id for outputs in found for output in outputs for token_id in output[2]]


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_yields_three_times_equals_the_unbroken_one(
    world: EngineThread, stream: bool
) -> None:
    first = request(CHAT, chat(stream=stream))
    whole = world.run(attempt(world, [first]))
    journal = [first]
    for epoch in (1, 2, 3):
        written = world.run(attempt(world, journal))
        own = [entry for entry in written.entries if entry.id.epoch == epoch]
        journal = [*journal, *own[:26], yield_of(epoch, b"other")]
    last = world.run(attempt(world, journal))
    assert last.recorder.head is not None
    assert last.recorder.head.status == 200
    assert token_ids(last) == token_ids(whole)
    assert len(token_ids(whole)) == 120
    assert same(last.body, whole.body)
    assert 0 < last.generated_tokens < 60, "three quarters come from the journal"


@pytest.mark.parametrize(
    ("more", "continuable"),
    [
        ({}, True),
        ({"temperature": 1.0}, True),
        ({"temperature": 1.0, "seed": 3}, False),
        ({"presence_penalty": 0.5}, True),
        ({"logprobs": True}, True),
        ({"n": 2, "temperature": 1.0}, False),
    ],
)
def test_the_first_output_says_whether_the_answer_can_be_continued(
    world: EngineThread, more: dict[str, Any], continuable: bool
) -> None:
    written = world.run(attempt(world, [request(CHAT, chat(stream=True, max_tokens=8, **more))]))
    outputs = [entry for entry in written.entries if entry.outputs is not None]
    assert len(outputs) > 2
    assert [b"c" in entry.fields for entry in outputs] == [continuable] + [False] * (
        len(outputs) - 1
    )
