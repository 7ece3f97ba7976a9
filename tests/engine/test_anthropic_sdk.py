"""Anthropic's unmodified SDK against an ingress, its journal, a worker and the real engine."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

pytest.importorskip("vllm")

from tests.engine.resume_helpers import EngineThread
from tests.engine.test_both_ways import Started
from tests.engine.test_messages import FUNCTIONS, WEATHER
from tests.journal.in_process import Door, in_process, settings_of

HELLO: Any = {"model": "hermes-tiny", "messages": [{"role": "user", "content": "Hello"}]}
GREEDY: Any = {"extra_body": {"temperature": 0}}
COUNT: Any = {**HELLO, **GREEDY, "max_tokens": 32_000, "stop_sequences": ["four"]}
CALL: Any = {
    **HELLO,
    "messages": [{"role": "user", "content": WEATHER}],
    "tools": FUNCTIONS,
    "max_tokens": 120,
    **GREEDY,
}


async def talk(d: Door) -> None:
    url = f"http://127.0.0.1:{d.port}"
    own: Any = {"base_url": url, "api_key": "none", "max_retries": 0, "timeout": 240}
    async with anthropic.AsyncAnthropic(**own) as client:
        answer = await client.messages.with_raw_response.create(**COUNT)
        whole = await answer.parse()
        request_id = answer.headers["request-id"]
        assert request_id == answer.headers["x-request-id"]
        assert whole.id == f"msg_{request_id}"
        async with client.messages.stream(**COUNT) as stream:
            streamed = await stream.get_final_message()
        assert [block.to_dict() for block in streamed.content] == [
            block.to_dict() for block in whole.content
        ]
        tokens = await client.messages.count_tokens(**HELLO)
        assert tokens.input_tokens == whole.usage.input_tokens
        call = await client.beta.messages.create(**CALL, betas=["a-beta-2026-01-01"])
        (used,) = [block for block in call.content if block.type == "tool_use"]
        assert (used.name, call.stop_reason) == ("get_weather", "tool_use")
        told = {"role": "assistant", "content": [block.to_dict() for block in call.content]}
        result = {"type": "tool_result", "tool_use_id": used.id, "content": "It rains."}
        turns = [*CALL["messages"], told, {"role": "user", "content": [result]}]
        assert (await client.messages.create(**{**CALL, "messages": turns})).content
        refusals: Any = (
            ({"max_tokens": 0}, anthropic.BadRequestError),
            ({"messages": [{"role": "user", "content": "x" * 9_000}]}, anthropic.BadRequestError),
            ({"model": "another"}, anthropic.NotFoundError),
        )
        for wrong, kind in refusals:
            for streamed_too in (False, True):
                with pytest.raises(kind) as refused:
                    await client.messages.create(**{**COUNT, **wrong, "stream": streamed_too})
                assert refused.value.body["type"] == "error"
        models = await client.models.list()
        assert [model.display_name for model in models.data] == ["hermes-tiny"]
        assert (await client.models.retrieve("hermes-tiny")).type == "model"


async def go_on_without_a_client(d: Door) -> None:
    """Detached, twice under one key, counted, and from an event on."""
    headers = {"prefer": "respond-async", "idempotency-key": "k"}
    body = {**HELLO, "max_tokens": 40, "stream": True}
    accepted = [await d.http.post("/v1/messages", json=body, headers=headers) for _ in range(2)]
    (request_id,) = {one.headers["request-id"] for one in accepted}
    assert [one.status_code for one in accepted] == [202, 202]
    whole = (await d.http.get(f"/v1/requests/{request_id}/response")).text
    events = f"/v1/requests/{request_id}/events"
    rest = (await d.http.get(events, headers={"last-event-id": "3"})).text
    assert whole.endswith(rest)
    assert rest.startswith("id: 4\n")
    known = (await d.http.get(f"/v1/requests/{request_id}")).json()
    last = json.loads(whole.split("event: message_delta\ndata: ")[1].split("\n")[0])
    assert known["usage"]["output_tokens"] == last["usage"]["output_tokens"]
    assert known["usage"]["prompt_tokens"] == last["usage"]["input_tokens"]


@pytest.mark.timeout(900)
def test_a_message_is_served_as_chats_are(
    world: EngineThread, redis_url: str, namespace: str
) -> None:
    async def run() -> None:
        settings = settings_of(redis_url, namespace, workers={"engine_stall_timeout_s": 600.0})
        async with in_process(settings, Started(world.engine)) as d:
            await talk(d)
            await go_on_without_a_client(d)

    world.run(run(), timeout_s=600)
