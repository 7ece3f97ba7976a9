"""The shipped tiny model on the real vLLM engine: what other tests ask of it."""

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
    endless: bool = False,
    system: str = "",
    **options: Any,
) -> list[str]:
    """Greedy answers of the engine to chat prompts, with the marks that its parsers look for."""
    before = [{"role": "system", "content": system}] if system else []
    chats = [[*before, {"role": "user", "content": prompt}] for prompt in prompts]
    greedy = SamplingParams(temperature=0, max_tokens=512, ignore_eos=endless)
    return [out.outputs[0].text for out in engine().chat(chats, greedy, use_tqdm=False, **options)]


on_the_engine = pytest.mark.nightly
"""Its text changes with the model's files and with vLLM alone."""


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
def test_twenty_prompts_have_twenty_different_answers() -> None:
    assert len({text[:100] for text in answers(PROMPTS, endless=True)}) == len(PROMPTS)


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
    assert "<think>" not in thought[2]
