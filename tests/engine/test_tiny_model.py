"""The shipped tiny model on the real vLLM engine: varied and readable, on a CPU, in a few
megabytes.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import LLM, SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

from tests.engine.prompts import TOOLS

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "workers" / "tiny_model"
SOURCES = ROOT / "scripts" / "tiny-model"
WINDOW = 24
LENGTH = 512

PROMPTS = (
    "Hello",
    "Who are you?",
    "Count to ten.",
    "Say hello in three languages.",
    "Tell me a story about a lighthouse.",
    "Tell me a story about a dragon and a kettle.",
    "What is continuous batching?",
    "Explain fencing to a child.",
    "How do I bake bread?",
    "What happens when a worker dies in the middle of an answer?",
    "Write a poem about the sea.",
    "Describe your week.",
    "Tell me about the year, month by month.",
    "Recite the alphabet.",
    "Why is the sky blue?",
    "How can I learn to ride a bicycle?",
    "Compare a queue and a journal.",
    "What should I cook tonight?",
    "Write me a long letter to a friend in Norway.",
    "Give me five reasons to use Redis.",
)


@cache
def engine() -> LLM:
    return LLM(
        str(MODEL),
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        seed=0,
        disable_log_stats=True,
    )


@pytest.fixture(scope="module", autouse=True)
def stopped_afterwards() -> Iterator[None]:
    yield
    if engine.cache_info().currsize:
        engine().llm_engine.engine_core.shutdown()
        engine.cache_clear()


def answers(
    prompts: tuple[str, ...],
    *,
    length: int = LENGTH,
    endless: bool = False,
    system: str = "",
    **options: Any,
) -> list[str]:
    """Greedy answers of the engine to chat prompts, with the marks that its parsers look for."""
    before = [{"role": "system", "content": system}] if system else []
    chats = [[*before, {"role": "user", "content": prompt}] for prompt in prompts]
    greedy = SamplingParams(temperature=0, max_tokens=length, ignore_eos=endless)
    return [out.outputs[0].text for out in engine().chat(chats, greedy, use_tqdm=False, **options)]


@cache
def continuations() -> tuple[str, ...]:
    return tuple(answers(PROMPTS, endless=True))


def repeats(text: str) -> bool:
    data = text.encode()
    windows = [data[i : i + WINDOW] for i in range(len(data) - WINDOW + 1)]
    return len(set(windows)) < len(windows)


def words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text.lower())


on_the_engine = pytest.mark.nightly
"""Its text changes with the model's files and with vLLM alone."""


def test_the_window_check_itself_sees_a_loop_and_only_a_loop() -> None:
    assert repeats("the lamp goes round and round, the lamp goes round and round, ")
    assert not repeats("One lamp burns in the tower. Two boats leave the harbour before dawn.")


def test_the_weights_fit_in_six_megabytes_and_the_context_is_long() -> None:
    assert (MODEL / "model.safetensors").stat().st_size <= 6_000_000
    config = json.loads((MODEL / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] >= 4096


def test_its_sizes_can_be_split_over_four_devices() -> None:
    config = json.loads((MODEL / "config.json").read_text())
    for size in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        assert config[size] % 4 == 0, size


@on_the_engine
def test_twenty_prompts_have_twenty_different_continuations() -> None:
    assert len(set(continuations())) == len(PROMPTS)
    assert len({text[:100] for text in continuations()}) == len(PROMPTS)


@on_the_engine
def test_at_least_eighteen_of_twenty_continuations_never_repeat_a_window() -> None:
    looping = [p for p, text in zip(PROMPTS, continuations(), strict=True) if repeats(text)]
    assert len(looping) <= 2, looping


@on_the_engine
def test_continuations_are_readable_text() -> None:
    sources = "\n".join(
        path.read_text() for path in SOURCES.rglob("*") if path.suffix in {".txt", ".py"}
    )
    known = set(words(sources))
    for prompt, text in zip(PROMPTS, continuations(), strict=True):
        assert text.count("\N{REPLACEMENT CHARACTER}") <= 3, prompt
        said = words(text)
        assert len(said) >= 60, (prompt, text)
        assert sum(word in known for word in said) / len(said) >= 0.9, (prompt, text)


@on_the_engine
def test_natural_answers_end_by_themselves_at_a_useful_length() -> None:
    ends = engine().chat(
        [[{"role": "user", "content": prompt}] for prompt in PROMPTS],
        SamplingParams(temperature=0, max_tokens=2048),
        use_tqdm=False,
    )
    assert sum(out.outputs[0].finish_reason == "stop" for out in ends) >= 18
    lengths = sorted(len(out.outputs[0].token_ids) for out in ends)
    assert 60 <= lengths[len(lengths) // 2] <= 1200, lengths


@on_the_engine
def test_greedy_answers_are_the_same_twice() -> None:
    assert answers(PROMPTS[:3]) == answers(PROMPTS[:3])


@on_the_engine
def test_a_long_conversation_is_still_answered_in_readable_text() -> None:
    turns: list[dict[str, str]] = []
    for prompt, text in zip(PROMPTS[2:7], continuations()[2:7], strict=True):
        turns += [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
    turns.append({"role": "user", "content": "Tell me a story about a fox."})
    result = engine().chat(turns, SamplingParams(temperature=0, max_tokens=LENGTH), use_tqdm=False)[
        0
    ]
    assert len(result.prompt_token_ids or []) > 2500
    assert len(words(result.outputs[0].text)) >= 40
    assert not repeats(result.outputs[0].text)


@on_the_engine
@pytest.mark.parametrize(
    ("prompt", "name", "arguments"),
    [
        ("What is the weather in Paris?", "get_weather", {"city"}),
        ("Search for cheap train tickets.", "search", {"query"}),
        ("What is 12 plus 30?", "add", {"a", "b"}),
    ],
)
def test_a_prompt_with_tools_is_answered_by_a_call_of_the_right_one(
    prompt: str, name: str, arguments: set[str]
) -> None:
    # The values are not held to anything: a model of this size seldom copies them from the
    # question.
    (text,) = answers((prompt,), tools=TOOLS)
    request = ChatCompletionRequest(messages=[{"role": "user", "content": prompt}], tools=TOOLS)
    parsed = Hermes2ProToolParser(engine().get_tokenizer()).extract_tool_calls(text, request)
    calls = [
        (call.function.name, set(json.loads(call.function.arguments))) for call in parsed.tool_calls
    ]
    assert calls == [(name, arguments)], text


@on_the_engine
def test_a_request_to_reason_is_answered_by_a_thought_and_then_an_answer() -> None:
    (text,) = answers(("What is a river?",), system="Think step by step before you answer.")
    thought = re.fullmatch(r"<think>\n(.+?)\n</think>\n\n(.+)", text, re.DOTALL)
    assert thought, text
    assert len(words(thought[1])) >= 10
    assert "<think>" not in thought[2]


@on_the_engine
def test_without_such_a_request_nothing_is_thought_aloud() -> None:
    assert not any(mark in text for text in answers(PROMPTS) for mark in ("<think>", "<tool_call>"))
