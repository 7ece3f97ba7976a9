"""The chunks of a stream are written as vLLM's classes write them, or by these."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from hypothesis import example, given, settings
from hypothesis import strategies as st
from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    UsageInfo,
)
from vllm.entrypoints.openai.chat_completion import serving as chat
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionLogProbs
from vllm.entrypoints.openai.completion import serving as completion
from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs
from vllm.entrypoints.serve.utils.tool_calls_utils import maybe_filter_parallel_tool_calls

from tests.engine.resume_helpers import EngineThread, attempt, body_of, request
from tests.tables import each
from workers import chunks

Make = Callable[..., Any]
Classes = dict[str, Make]
KINDS: dict[Any, tuple[str, ...]] = {
    chat: ("DeltaMessage", "ChatCompletionResponseStreamChoice", "ChatCompletionStreamResponse"),
    completion: ("CompletionResponseStreamChoice", "CompletionStreamResponse"),
}


@pytest.fixture(scope="module")
def app(world: EngineThread) -> Any:
    """The server app of a running engine."""
    return world.engine._app


def replaced(module: Any) -> bool:
    found = {hasattr(getattr(module, name), "__wrapped__") for name in KINDS[module]}
    assert len(found) == 1, "all or none"
    return found.pop()


class Citing(DeltaMessage):  # type: ignore[misc]
    """A parser's own delta, as Cohere's is."""

    citations: list[str]


# -- the same bytes -------------------------------------------------------------------------------

clean = st.text(max_size=8)
text = clean | st.text(st.characters(exclude_categories=()), max_size=8) | st.just("a\ud800")
"""With lone surrogates, too."""
maybe_text = st.none() | text
ids = st.none() | st.lists(st.integers(0, 2**31), max_size=2)
small = st.integers(0, 3)
calls = st.lists(
    st.builds(DeltaToolCall, index=small, function=st.builds(DeltaFunctionCall, name=st.just("f"))),
    max_size=2,
)
of_parser = st.one_of(
    st.builds(DeltaMessage, content=clean),
    st.builds(DeltaMessage, reasoning=clean),
    st.builds(DeltaMessage, role=clean, content=st.none(), tool_calls=calls),
    st.builds(Citing, content=clean, citations=st.lists(clean, max_size=1)),
    st.builds(DeltaMessage, content=clean, unheard_of=small),
)
ends = {
    "finish_reason": st.none() | st.sampled_from(["stop", "length", "abort", "tool_calls"]),
    "stop_reason": st.one_of(st.none(), text, st.integers(-(2**70), 2**70)),
}


MADE_UP = {"id", "created"}
"""What vLLM's classes take from chance and the clock if it is not given."""


@st.composite
def fields(draw: Any, usual: dict[str, Any], unusual: dict[str, Any]) -> dict[str, Any]:
    """What is usual, perhaps without one of it, and up to two others."""
    left_out = draw(st.sampled_from([None, None, None, *sorted(usual.keys() - MADE_UP)]))
    added = draw(st.lists(st.sampled_from([*unusual]), max_size=2, unique=True))
    made = {name: draw(value) for name, value in usual.items() if name != left_out}
    return made | {name: draw(unusual[name]) for name in added}


made_here = fields(
    {"content": text},
    {
        "content": maybe_text | st.just([{"type": "text"}]),
        "role": maybe_text,
        "reasoning": maybe_text,
        "unheard_of": small,
    },
)
deltas = st.booleans().flatmap(lambda by_parser: of_parser if by_parser else made_here)
none = st.none()
chat_choices = fields(
    {"index": small, "delta": deltas, "logprobs": none, "finish_reason": none, "token_ids": none},
    {**ends, "logprobs": st.builds(ChatCompletionLogProbs, content=none), "token_ids": ids},
)
text_choices = fields(
    {"index": small, "text": text, "logprobs": none, **ends, "token_ids": none},
    {
        "text": none | st.just(["text"]),
        "logprobs": st.builds(CompletionLogProbs, tokens=st.lists(clean, max_size=1)),
        "prompt_token_ids": ids,
        "token_ids": ids,
    },
)
known = {"id": text, "created": st.integers(0, 2**40), "model": clean}
usage = st.builds(UsageInfo, prompt_tokens=small, total_tokens=small)
unusual = {"usage": none | usage, "system_fingerprint": maybe_text, "metrics": none}


def one_or_more(choices: Any) -> Any:
    return st.lists(choices, min_size=1, max_size=1) | st.lists(choices, max_size=2)


chat_chunks = fields(
    {
        **known,
        "choices": one_or_more(chat_choices),
        "object": st.just("chat.completion.chunk"),
        "prompt_text": none,
    },
    {**unusual, "prompt_token_ids": ids, "prompt_text": maybe_text},
)
text_chunks = fields(
    {**known, "choices": one_or_more(text_choices), "object": st.just("text_completion")}, unusual
)
set_later = st.fixed_dictionaries({}, optional={"usage": usage, "system_fingerprint": clean})
ways = st.one_of(
    st.just({"exclude_unset": True}),
    st.fixed_dictionaries(
        {},
        optional={
            "exclude_unset": st.booleans(),
            "exclude_none": st.booleans(),
            "indent": st.just(2),
        },
    ),
)


def written(
    classes: list[Make], chunk: dict[str, Any], later: dict[str, Any], how: dict[str, Any]
) -> str:
    """What vLLM's serving layer sends of it, or how it fails."""
    *delta_class, choice_class, chunk_class = classes
    try:
        choices = []
        for choice in chunk["choices"]:
            if isinstance(delta := choice.get("delta"), dict):
                choice = {**choice, "delta": delta_class[0](**delta)}
            elif delta is not None:
                choice = {**choice, "delta": delta.model_copy(deep=True)}  # calls are left out
            made = choice_class(**choice)
            if delta_class:
                made = maybe_filter_parallel_tool_calls(
                    made, SimpleNamespace(parallel_tool_calls=False)
                )
            choices.append(made)
        one = chunk_class(**{**chunk, "choices": choices})
        for name, value in later.items():
            setattr(one, name, value)
        return str(one.model_dump_json(**how))
    except Exception as error:
        return repr(error)


def both(module: Any, *arguments: Any) -> tuple[str, str]:
    """By the stand-ins, and by vLLM's classes."""
    assert replaced(module)
    stand_ins = [getattr(module, name) for name in KINDS[module]]
    own = [make.__wrapped__ for make in stand_ins]
    return written(stand_ins, *arguments), written(own, *arguments)


PLAIN = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
USUAL = {"index": 0, "logprobs": None, "finish_reason": None, "token_ids": None}
IN_PARTS = {**PLAIN, "choices": [{**USUAL, "delta": {"content": [{"type": "text"}]}}]}


@settings(max_examples=1000)
@example((chat, IN_PARTS), {}, {"exclude_unset": True})
@given(
    st.tuples(st.just(chat), chat_chunks) | st.tuples(st.just(completion), text_chunks),
    set_later,
    ways,
)
@pytest.mark.usefixtures("app")
def test_a_chunk_has_the_bytes_of_vllms_classes(
    chunk: tuple[Any, dict[str, Any]], later: dict[str, Any], how: dict[str, Any]
) -> None:
    stand_in, own = both(*chunk, later, how)
    assert stand_in == own


@pytest.mark.usefixtures("app")
def test_every_character_is_escaped_as_by_vllm() -> None:
    every = "".join(chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    chunk = {**PLAIN, "choices": [{**USUAL, "delta": {"content": every}}]}
    stand_in, own = both(chat, chunk, {}, {"exclude_unset": True})
    assert stand_in == own


@each(
    "delta, kind",
    [
        ({"content": "text"}, chunks.ChatCompletionStreamResponse),
        ({"role": "assistant", "content": ""}, chunks.ChatCompletionStreamResponse),
        (DeltaMessage(reasoning="text"), chunks.ChatCompletionStreamResponse),
        (DeltaMessage(tool_calls=[DeltaToolCall(index=0)]), None),
    ],
)
@pytest.mark.usefixtures("app")
def test_only_what_is_unusual_costs_vllms_classes(delta: Any, kind: Any) -> None:
    made = chat.DeltaMessage(**delta) if isinstance(delta, dict) else delta
    choice = chat.ChatCompletionResponseStreamChoice(delta=made, **USUAL)
    one = chat.ChatCompletionStreamResponse(choices=[choice], **PLAIN)
    assert type(one) is (kind or chat.ChatCompletionStreamResponse.__wrapped__)


CHAT = {"messages": [{"role": "user", "content": "Say hello in three languages."}]}
GREEDY = {"model": "hermes-tiny", "stream": True, "temperature": 0, "max_tokens": 12}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@each(
    "path, more",
    [
        ("/v1/chat/completions", {**CHAT, "n": 2}),
        ("/v1/chat/completions", {**CHAT, **USAGE, "logprobs": True, "top_logprobs": 1}),
        ("/v1/completions", {"prompt": "é€é€", "stop": ["e"]}),
        ("/v1/completions", {"prompt": "Count", "echo": True, "return_token_ids": True, **USAGE}),
    ],
)
def test_a_stream_that_vllms_classes_began_is_continued_with_the_same_bytes(
    world: EngineThread, path: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = request(path, {**GREEDY, **more})
    with monkeypatch.context() as own:
        for module, names in KINDS.items():
            for name in names:
                own.setattr(module, name, getattr(module, name).__wrapped__)
        whole = world.run(attempt(world, [start]))
    assert replaced(chat)
    for kept in (2, len(whole.entries) // 2, len(whole.entries) - 1):
        continued = world.run(attempt(world, [start, *whole.entries[1:kept]]))
        assert continued.attempt.lost is None
        assert continued.body == body_of(whole.entries)


def test_a_second_engine_of_a_process_finds_them_replaced(app: Any) -> None:
    own = {name: getattr(chat, name).__wrapped__ for name in KINDS[chat]}
    chunks.install(app)
    assert {name: getattr(chat, name).__wrapped__ for name in own} == own
    assert replaced(chat)
    assert replaced(completion)


def test_an_app_without_answers_is_left_alone() -> None:
    chunks.install(SimpleNamespace(state=SimpleNamespace()))
