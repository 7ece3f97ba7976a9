"""Greedy output does not depend on other requests, and no event is lost or duplicated among many
streams.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

from tests.service.support import Running, Stream, together

REPEATS = 16


def test_greedy_output_is_reproducible_among_mixed_traffic(service: Running) -> None:
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

    calls = [partial(ask, n) for n in range(REPEATS) for ask in (repeat, other)]
    chance.shuffle(calls)
    texts = [text for text in together(calls, 48) if text]
    assert len(texts) == REPEATS
    assert len(set(texts)) == 1
    assert texts[0] == service.text(prompt, 40)
