"""Greedy output does not depend on other requests, and no event is lost or duplicated among many
streams.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest

from tests.service.support import Running, Stream, together

PROMPTS = (
    "Hello",
    "Who are you?",
    "Count to ten.",
    "Say hello in three languages.",
    "Tell me a story about a lighthouse.",
    "Explain fencing to a child.",
    "How do I bake bread?",
    "Write a poem about the sea.",
    "Describe your week.",
    "Recite the alphabet.",
    "Why is the sky blue?",
    "Compare a queue and a journal.",
    "What should I cook tonight?",
    "What is continuous batching?",
    "Give me five reasons to use Redis.",
    "How can I learn to ride a bicycle?",
)


@pytest.mark.parametrize("repeats", [16, pytest.param(200, marks=pytest.mark.nightly)])
def test_greedy_output_is_reproducible_among_mixed_traffic(service: Running, repeats: int) -> None:
    prompt = "What happens when a worker dies in the middle of an answer?"
    chance = random.Random(20_260)

    def repeat(n: int) -> str:
        answer = service.ask(prompt, 40, headers={"x-session-id": f"repeat-{n}"})
        return str(answer.json()["choices"][0]["message"]["content"])

    def other(n: int) -> str:
        words = " ".join(
            chance.choice(("sea", "ray", "queue", "token", "kettle"))
            for _ in range(chance.randint(1, 60))
        )
        more: dict[str, Any] = {"temperature": chance.choice((0, 0.7, 1.3))}
        with service.stream(words, chance.randint(1, 80), **more) as response:
            found = Stream(response).rest()
        assert [event.id for event in found] == list(range(1, len(found) + 1))
        return ""

    calls = [partial(ask, n) for n in range(repeats) for ask in (repeat, other)]
    chance.shuffle(calls)
    texts = [text for text in together(calls, 48) if text]
    assert len(texts) == repeats
    assert len(set(texts)) == 1
    assert texts[0] == service.text(prompt, 40)


@pytest.mark.nightly  # the gate has the same texts under mixed traffic, and across a death
def test_streams_side_by_side_have_the_texts_that_they_have_alone(service: Running) -> None:
    def streamed(prompt: str) -> str:
        with service.sdk.chat.completions.create(
            model=service.model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=80,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        ) as stream:
            return "".join(
                chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices
            )

    alone = [service.text(prompt, 80) for prompt in PROMPTS]
    assert together([partial(streamed, prompt) for prompt in PROMPTS * 2]) == alone * 2
    assert len(set(alone)) > len(PROMPTS) // 2, "the texts differ, so that a mix-up would show"
