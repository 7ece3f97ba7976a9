"""The unmodified `openai` SDK against the whole service."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import APIStatusError, NotFoundError

from tests.service.support import STORY, Running

GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}
MESSAGES: Any = [{"role": "user", "content": STORY}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ASK_WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


def test_a_streamed_chat_has_the_text_of_the_one_that_is_not(service: Running) -> None:
    chat = service.sdk.chat.completions
    whole = chat.create(model=service.model, messages=MESSAGES, max_tokens=64, **GREEDY)
    chunks = list(
        chat.create(
            model=service.model,
            messages=MESSAGES,
            max_tokens=64,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == whole.choices[0].message.content
    assert len(streamed) > 20
    assert whole.choices[0].finish_reason == "length"
    assert [
        c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason
    ] == ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (
        chunks[-1].usage.prompt_tokens,
        chunks[-1].usage.completion_tokens,
    )


def test_the_usage_of_a_chat_is_what_the_tokenizer_counts(service: Running) -> None:
    counted = service.http.post(
        "/tokenize", json={"model": service.model, "messages": MESSAGES}
    ).json()["count"]
    answer = service.sdk.chat.completions.create(
        model=service.model, messages=MESSAGES, max_tokens=7, **GREEDY
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == counted
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == counted + 7


def test_tokens_can_be_counted_and_turned_back_into_text(service: Running) -> None:
    tokens = service.http.post(
        "/tokenize",
        json={"model": service.model, "prompt": "The sea.", "add_special_tokens": False},
    )
    back = service.http.post(
        "/detokenize", json={"model": service.model, "tokens": tokens.json()["tokens"]}
    )
    assert back.json()["prompt"] == "The sea."


def test_a_streamed_completion_has_the_text_of_the_one_that_is_not(service: Running) -> None:
    completions = service.sdk.completions
    whole = completions.create(
        model=service.model, prompt="Once upon a time", max_tokens=48, **GREEDY
    )
    streamed = completions.create(
        model=service.model, prompt="Once upon a time", max_tokens=48, stream=True, **GREEDY
    )
    assert (
        "".join(chunk.choices[0].text for chunk in streamed if chunk.choices)
        == whole.choices[0].text
    )
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 48


def test_several_prompts_get_a_choice_each(service: Running) -> None:
    prompts = ["The sea is", "A dragon and a kettle", "1, 2, 3,"]
    answer = service.sdk.completions.create(
        model=service.model, prompt=prompts, max_tokens=12, **GREEDY
    )
    alone = [
        service.sdk.completions.create(model=service.model, prompt=p, max_tokens=12, **GREEDY)
        for p in prompts
    ]
    assert [choice.text for choice in answer.choices] == [one.choices[0].text for one in alone]


def test_a_streamed_response_has_the_text_of_the_one_that_is_not(service: Running) -> None:
    responses = service.sdk.responses
    whole = responses.create(model=service.model, input=STORY, temperature=0, max_output_tokens=40)
    events = list(
        responses.create(
            model=service.model, input=STORY, temperature=0, max_output_tokens=40, stream=True
        )
    )
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == whole.output_text
    assert len(deltas) > 10
    assert whole.usage is not None
    last: Any = events[-1]
    assert last.response.usage.output_tokens == whole.usage.output_tokens
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_models_are_listed_and_retrieved(service: Running) -> None:
    assert [model.id for model in service.sdk.models.list()] == [service.model]
    assert service.sdk.models.retrieve(service.model).id == service.model
    with pytest.raises(NotFoundError, match="does not exist"):
        service.sdk.models.retrieve("gpt-4o")


def test_the_headers_of_an_answer_name_its_replica_and_engine(service: Running) -> None:
    raw = service.sdk.chat.completions.with_raw_response.create(
        model=service.model,
        messages=MESSAGES,
        max_tokens=4,
        extra_headers={"x-request-id": "mine-1"},
    )
    headers = raw.headers
    assert headers["x-request-id"].startswith("req_")
    assert headers["x-client-request-id"] == "mine-1"
    assert int(headers["x-hermes-attempts"]) >= 1
    assert headers["x-hermes-engine"].startswith("vllm-")
    assert 0 <= int(headers["x-hermes-queue-ms"]) < 60_000
    state = service.state(headers["x-request-id"])
    assert state["replica"] == headers["x-hermes-replica"]
    assert state["client_request_id"] == "mine-1"
    assert "x-hermes-reason" not in headers
    assert raw.parse().choices


def test_a_stream_has_the_same_headers(service: Running) -> None:
    raw = service.sdk.chat.completions.with_raw_response.create(
        model=service.model, messages=MESSAGES, max_tokens=4, stream=True
    )
    assert raw.headers["x-request-id"].startswith("req_")
    for name in ("replica", "attempts", "engine", "queue-ms"):
        assert raw.headers[f"x-hermes-{name}"]
    assert "x-client-request-id" not in raw.headers, "the client gave none, whatever Serve makes up"
    assert service.state(raw.headers["x-request-id"])["client_request_id"] is None
    assert len(list(raw.parse())) >= 1


def test_a_tool_call_is_parsed_streamed_or_not(service: Running) -> None:
    """What the model says is forced by a grammar, so that this holds for any model; the parser is
    not told.
    """
    chat = service.sdk.chat.completions
    said = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    asked: dict[str, Any] = {
        "model": service.model,
        "messages": ASK_WEATHER,
        "tools": [WEATHER],
        "max_tokens": 128,
        "extra_body": {"structured_outputs": {"choice": [said]}},
    }
    (choice,) = chat.create(**asked).choices
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    (call,) = choice.message.tool_calls or []
    assert call.id
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "get_weather",
        {"city": "Paris"},
    )

    choices = [chunk.choices[0] for chunk in chat.create(stream=True, **asked) if chunk.choices]
    parts = [
        part.function
        for choice in choices
        for part in choice.delta.tool_calls or []
        if part.function
    ]
    assert "".join(part.name or "" for part in parts) == "get_weather"
    assert json.loads("".join(part.arguments or "" for part in parts)) == {"city": "Paris"}
    assert choices[-1].finish_reason == "tool_calls"


def test_embeddings_of_a_model_without_them_get_the_engines_error(service: Running) -> None:
    with pytest.raises(APIStatusError) as caught:
        service.sdk.embeddings.create(model=service.model, input="a text", encoding_format="float")
    assert 400 <= caught.value.status_code < 500
    assert isinstance(caught.value.body, dict), (
        "an error in OpenAI's shape has a body that the SDK can read"
    )
    assert caught.value.body["message"]
    assert caught.value.response.headers["x-hermes-reason"]
    assert caught.value.response.headers["x-hermes-engine"].startswith("vllm-")
