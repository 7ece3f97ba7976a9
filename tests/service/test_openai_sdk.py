"""The unmodified `openai` SDK against the whole service."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import pytest
from openai import BadRequestError, NotFoundError

from tests.service.support import STORY, Running, asking, text_of_chunks
from tests.waiting import until

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


def chat(service: Running, tokens: int, **more: Any) -> Any:
    """A greedy chat by the SDK."""
    return service.sdk.chat.completions.create(**{**asking(STORY, tokens), **GREEDY, **more})


def complete(service: Running, prompt: Any, tokens: int, **more: Any) -> Any:
    """A greedy completion by the SDK."""
    return service.sdk.completions.create(
        **{"model": service.model, "prompt": prompt, "max_tokens": tokens, **GREEDY, **more}
    )


def test_a_streamed_chat_has_the_text_of_the_one_that_is_not(service: Running) -> None:
    whole = chat(service, 64)
    chunks = list(chat(service, 64, stream=True, stream_options={"include_usage": True}))
    streamed = text_of_chunks(chunks)
    assert streamed == whole.choices[0].message.content
    assert len(streamed) > 20
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert (
        [reason for reason in reasons if reason] == [whole.choices[0].finish_reason] == ["length"]
    )
    assert len({chunk.id for chunk in chunks}) == 1
    assert whole.usage.prompt_tokens == chunks[-1].usage.prompt_tokens
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens


def test_the_usage_of_a_chat_is_what_the_tokenizer_counts(service: Running) -> None:
    body = {"model": service.model, "messages": MESSAGES}
    counted = service.http.post("/tokenize", json=body).json()["count"]
    usage = chat(service, 7).usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (counted, 7)
    assert usage.total_tokens == counted + 7


def test_tokens_can_be_counted_and_turned_back_into_text(service: Running) -> None:
    def asked(path: str, **fields: Any) -> Any:
        return service.http.post(path, json={"model": service.model, **fields}).json()

    tokens = asked("/tokenize", prompt="The sea.", add_special_tokens=False)["tokens"]
    assert asked("/detokenize", tokens=tokens)["prompt"] == "The sea."


def test_several_prompts_get_a_choice_each(service: Running) -> None:
    prompts = ["The sea is", "A dragon and a kettle", "1, 2, 3,"]
    together = complete(service, prompts, 12)
    alone = [complete(service, prompt, 12).choices[0].text for prompt in prompts]
    assert [choice.text for choice in together.choices] == alone


def test_a_streamed_response_has_the_text_of_the_one_that_is_not(service: Running) -> None:
    create: Any = service.sdk.responses.create
    asked = {"model": service.model, "input": STORY, "temperature": 0, "max_output_tokens": 40}
    whole, events = create(**asked), list(create(**asked, stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == whole.output_text
    assert len(deltas) > 10
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens
    assert [event.sequence_number for event in events] == list(range(len(events)))
    helper: Any = service.sdk.responses.stream
    with helper(**asked) as stream:
        last: Any = list(stream)[-1]
    assert last.type == "response.incomplete"
    for made in (whole, events[-1].response, last.response):
        assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert [item.status for item in made.output] == ["incomplete"]


def test_a_response_in_the_background_is_fetched_streamed_again_and_deleted(
    service: Running,
) -> None:
    responses: Any = service.sdk.responses
    asked = {"model": service.model, "input": STORY, "temperature": 0, "max_output_tokens": 40}
    whole = responses.create(**asked)
    of_its_own = {"metadata": {"job": "7"}, "safety_identifier": "somebody", "top_p": 0.9}
    later = responses.create(**asked, **of_its_own, background=True)
    assert (later.status, later.background) in (("queued", True), ("in_progress", True))

    def fetched(response_id: str) -> Any:
        found = responses.retrieve(response_id)
        return found if found.status not in ("queued", "in_progress") else None

    found = until("it has ended", lambda: fetched(later.id))
    assert (found.id, found.background, found.status) == (later.id, True, whole.status)
    assert (found.output_text, found.usage) == (whole.output_text, whole.usage)
    said = later.model_fields_set - {"status", "output", "usage", "incomplete_details"}
    assert found.model_dump(include=said) == later.model_dump(include=said)

    stream = responses.create(**asked, background=True, stream=True)
    first = next(iter(stream))
    stream.close()  # and nothing is cancelled
    events = list(responses.retrieve(first.response.id, stream=True))
    assert (events[0], first.response.background) == (first, True)
    rest = list(responses.retrieve(first.response.id, stream=True, starting_after=4))
    assert rest == events[5:]
    assert rest[0].sequence_number == 5
    assert fetched(first.response.id).output_text == whole.output_text
    responses.delete(first.response.id)
    with pytest.raises(NotFoundError, match="not found"):
        responses.retrieve(first.response.id)

    wrong = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "wat"}}}
    refused = responses.create(**asked, text=wrong, background=True)
    failed = until("it has ended", lambda: fetched(refused.id))
    assert (failed.status, failed.error.code) == ("failed", "invalid_request")
    with pytest.raises(BadRequestError) as error:
        responses.create(**asked, text=wrong)
    assert failed.error.message == error.value.body["message"]  # type: ignore[index]


def test_a_conversation_goes_on_by_the_id_of_its_last_response(service: Running) -> None:
    responses: Any = service.sdk.responses
    usual = {"model": service.model, "temperature": 0, "max_output_tokens": 16}
    first = responses.create(input=STORY, **usual)
    second = responses.create(input="Why?", previous_response_id=first.id, **usual)
    said = [item.to_dict() for item in first.output]
    whole = [{"role": "user", "content": STORY}, *said, {"role": "user", "content": "Why?"}]
    by_hand = responses.create(input=whole, store=False, **usual)
    assert (second.output_text, second.usage) == (by_hand.output_text, by_hand.usage)
    assert second.previous_response_id == first.id
    *_, last = responses.create(input=STORY, stream=True, **usual)
    for earlier in (first, last.response):
        named = [{"type": "item_reference", "id": item.id} for item in earlier.output]
        by_ids = responses.create(input=[whole[0], *named, whole[-1]], **usual)
        assert (by_ids.output_text, by_ids.usage) == (second.output_text, second.usage)
    items = list(responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.role for item in items] == ["user", "assistant", "user"]
    counted = responses.input_tokens.count(
        model=service.model, input="Why?", previous_response_id=first.id
    )
    assert counted.input_tokens == second.usage.input_tokens
    short = {"max_output_tokens": 32}
    compacted = responses.compact(
        model=service.model, previous_response_id=second.id, extra_body=short
    )
    assert [item.type for item in compacted.output] == ["message", "message", "compaction"]
    went_on = responses.create(input=[*compacted.output, whole[0]], **usual)
    assert went_on.usage.input_tokens > compacted.usage.output_tokens
    responses.delete(first.id)
    third = responses.create(input="And?", previous_response_id=second.id, **usual)
    assert third.status in ("completed", "incomplete"), "it needs no response but the last"
    with pytest.raises(BadRequestError, match="not found") as error:
        responses.create(input="And?", previous_response_id=first.id, **usual)
    assert error.value.code == "previous_response_not_found"


def test_chat_completions_are_stored_listed_changed_and_deleted(service: Running) -> None:
    chats: Any = service.sdk.chat.completions
    mark = {"test": uuid4().hex}
    whole = chats.create(**asking(STORY, 8, temperature=0), store=True, metadata=mark)
    stream = chats.create(**asking(STORY, 8, temperature=0, stream=True), store=True, metadata=mark)
    (streamed,) = {chunk.id for chunk in stream}
    found = list(chats.list(metadata=mark, order="asc", limit=1))
    assert [one.id for one in found] == [whole.id, streamed]
    assert found[0].choices == whole.choices
    assert found[1].choices[0].message.content == whole.choices[0].message.content
    assert chats.retrieve(whole.id).usage == whole.usage == found[1].usage
    (message,) = chats.messages.list(whole.id)
    assert message.content == STORY
    assert chats.update(whole.id, metadata={"test": "changed"}).metadata == {"test": "changed"}
    assert [one.id for one in chats.list(metadata=mark)] == [streamed]
    for chat_id in (whole.id, streamed):
        assert chats.delete(chat_id).deleted
        with pytest.raises(NotFoundError, match="not found"):
            chats.retrieve(chat_id)


def test_a_model_answers_to_its_aliases(service: Running) -> None:
    sdk, alias = service.sdk, "gpt-5-mini"
    assert sdk.models.retrieve(alias).id == chat(service, 2, model=alias).model == alias
    assert {one.model for one in chat(service, 2, model=alias, stream=True)} == {alias}
    first = sdk.responses.create(model=alias, input="Hello", max_output_tokens=16)
    events = sdk.responses.create(
        model=alias,
        input="Go on.",
        max_output_tokens=16,
        previous_response_id=first.id,
        stream=True,
    )
    models = {event.response.model for event in events if hasattr(event, "response")}
    assert models == {sdk.responses.retrieve(first.id).model} == {alias}


def test_models_are_listed_and_retrieved(service: Running) -> None:
    assert [model.id for model in service.sdk.models.list()] == [service.model]
    assert service.sdk.models.retrieve(service.model).id == service.model
    with pytest.raises(NotFoundError, match="does not exist"):
        service.sdk.models.retrieve("gpt-4o")


def test_there_may_be_as_many_stop_texts_as_the_limit_says(service: Running) -> None:
    """vLLM has a limit of its own, which it reads from the environment when it is imported."""
    stop = [f"z{number}q" for number in range(16)]
    whole = chat(service, 3, stop=stop)
    assert whole.choices[0].message.content == chat(service, 3).choices[0].message.content
    assert complete(service, STORY, 3, stop=stop).choices[0].finish_reason == "length"
    asked: dict[str, Any] = {"model": service.model, "input": STORY, "max_output_tokens": 16}
    assert service.sdk.responses.create(**asked, extra_body={"stop": stop}).output
    with pytest.raises(BadRequestError, match="'stop' contains more than 16 texts"):
        chat(service, 3, stop=[*stop, "z"])


def test_the_headers_of_an_answer_name_its_replica_and_engine(service: Running) -> None:
    create = service.sdk.chat.completions.with_raw_response.create
    raw = create(**asking(STORY, 4), extra_headers={"x-request-id": "mine-1"})
    headers = raw.headers
    assert headers["x-request-id"].startswith("req_")
    assert "," not in headers["x-request-id"], "Serve adds no second one"
    assert headers["x-client-request-id"] == "mine-1"
    assert int(headers["x-hermes-attempts"]) >= 1
    assert headers["x-hermes-engine"].startswith("vllm-")
    assert 0 <= int(headers["x-hermes-queue-ms"]) < 60_000
    state = service.state(headers["x-request-id"])
    assert state["replica"] == headers["x-hermes-replica"]
    assert state["client_request_id"] == "mine-1"
    assert "x-hermes-reason" not in headers
    assert raw.parse().choices
    streamed = create(**asking(STORY, 4, stream=True))
    assert "x-client-request-id" not in streamed.headers, "Serve makes none up"
    assert len(list(streamed.parse())) >= 1


def test_a_tool_call_is_parsed_streamed_or_not(service: Running) -> None:
    """What the model says is forced by a grammar, so that this holds for any model; the parser is
    not told.
    """
    said = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    asked = {
        "messages": ASK_WEATHER,
        "tools": [WEATHER],
        "extra_body": {"structured_outputs": {"choice": [said]}},
    }
    (choice,) = chat(service, 128, **asked).choices
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    (call,) = choice.message.tool_calls
    assert call.id
    function = call.function
    assert (function.name, json.loads(function.arguments)) == ("get_weather", {"city": "Paris"})

    chunks = [
        chunk.choices[0] for chunk in chat(service, 128, stream=True, **asked) if chunk.choices
    ]
    parts = [call.function for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert "".join(part.name or "" for part in parts if part) == "get_weather"
    assert json.loads("".join(part.arguments or "" for part in parts if part)) == {"city": "Paris"}
    assert chunks[-1].finish_reason == "tool_calls"
