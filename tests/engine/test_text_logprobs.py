"""Which positions come with which text, for tokens of several characters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams

from tests.tables import each
from workers.answers import of_the_text

END, SPECIAL = 1, 2
Delta = tuple[str, list[str], str | None, int | str | None]
"""Text, tokens, finish reason and stop reason."""


class Tokenizer:
    all_special_ids = (END, SPECIAL)


def output(text: str, tokens: list[str], finish: str | None, stop: int | str | None) -> Any:
    ids = [{"</s>": END, "<s>": SPECIAL}.get(token, 10 + len(token)) for token in tokens]
    positions = [
        {id_: Logprob(-1.0, 1, token), 99: Logprob(-2.0, 2, "other")}
        for id_, token in zip(ids, tokens, strict=True)
    ]
    item = CompletionOutput(0, text, ids, None, positions, finish_reason=finish, stop_reason=stop)
    return RequestOutput("r", None, [], None, [item], finish is not None)


def shown(deltas: list[Delta], params: SamplingParams) -> list[list[str | None]]:
    """The tokens of the positions with each delta."""

    async def outputs() -> AsyncGenerator[RequestOutput, None]:
        for delta in deltas:
            yield output(*delta)

    async def run() -> list[list[str | None]]:
        return [
            [next(iter(one.values())).decoded_token for one in made.outputs[0].logprobs or ()]
            async for made in of_the_text(outputs(), params, Tokenizer())
        ]

    return asyncio.run(run())


@each(
    "deltas, params, expected",
    [
        # The end token, whose text is shown only where it is asked for.
        ([("Hi", ["Hi"], None, None), ("", ["</s>"], "stop", None)], {}, [["Hi"], []]),
        ([("Hi!", ["Hi", "!"], "stop", 13)], {}, [["Hi"]]),
        (
            [("Hi!", ["Hi", "!"], "stop", 13)],
            {"include_stop_str_in_output": True},
            [["Hi", "!"]],
        ),
        # A special token that is not shown.
        ([("Hi", ["Hi", "<s>"], None, None), ("!", ["!"], "length", None)], {}, [["Hi"], ["!"]]),
        (
            [("Hi<s>", ["Hi", "<s>"], None, None), ("!", ["!"], "length", None)],
            {"skip_special_tokens": False},
            [["Hi", "<s>"], ["!"]],
        ),
        # Parts of a character come with it.
        ([("", [""], None, None), ("é", ["é"], "length", None)], {}, [[], ["", "é"]]),
        # A text that is held back for a stop text of five characters.
        (
            [("", ["One"], None, None), ("On", ["two"], None, None), ("etwo", [], "length", None)],
            {"stop": ["three"]},
            [[], [], ["One", "two"]],
        ),
        (
            [("One", ["One", " t"], None, None), (" ", ["hre", "e."], "stop", "three")],
            {"stop": ["three"]},
            [["One"], [" "]],
        ),
        ([("One", ["One", "three"], "stop", "three")], {"stop": ["three"]}, [["One"]]),
        (
            [("One thre", ["One", " thr", "ee"], "stop", "thre")],
            {"stop": ["thre"], "include_stop_str_in_output": True},
            [["One", " thr", "e"]],
        ),
    ],
)
def test_each_position_comes_with_its_text(
    deltas: list[Delta], params: dict[str, Any], expected: list[list[str]]
) -> None:
    assert shown(deltas, SamplingParams(logprobs=1, **params)) == expected
