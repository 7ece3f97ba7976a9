"""The log probabilities of an answer are those of its text: each position comes with its text, and
what is not in the text has none. vLLM has one for every token: for the end token, too, for special
tokens that it does not show, for a stop text, and before a text that it holds back.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams


class Position(dict[int, Logprob]):
    """Of one token, which comes first, and of its alternatives."""


async def of_the_text(
    outputs: AsyncGenerator[RequestOutput, None], params: SamplingParams, tokenizer: Any
) -> AsyncGenerator[RequestOutput, None]:
    """A generation's outputs, which are deltas, with the positions of the text in each."""
    texts: dict[int, _Text] = {}
    hidden = _specials(tokenizer) if params.skip_special_tokens else frozenset()
    async with aclosing(outputs):
        async for output in outputs:
            for item in output.outputs:
                if item.logprobs is not None:
                    text = texts.setdefault(item.index, _Text(params, hidden))
                    item.logprobs = text.positions(item)
            yield output


class _Text:
    """One of the `n` answers, as far as it goes."""

    def __init__(self, params: SamplingParams, hidden: frozenset[int]) -> None:
        self._params = params
        self._hidden = hidden
        self._length = 0
        self._shown = 0
        """Characters of the text, and of the positions that have been given out."""
        self._held: list[Position] = []

    def positions(self, item: CompletionOutput) -> list[Position]:
        """Those that belong to the text up to the end of this delta, and were not given out."""
        self._length += len(item.text)
        new = list(zip(item.token_ids, item.logprobs or (), strict=False))
        by_token = item.finish_reason == "stop" and not isinstance(item.stop_reason, str)
        if by_token and not self._params.include_stop_str_in_output:
            new = new[:-1]
        self._held += [Position(one) for token, one in new if one and token not in self._hidden]
        if item.finish_reason is not None:
            by_text = isinstance(item.stop_reason, str)
            return self._up_to_the_text() if by_text else self._held
        if not item.text:
            return []
        if not self._params.stop:
            given, self._held = self._held, []
            return given
        return self._before_the_text()

    def _before_the_text(self) -> list[Position]:
        """Those whose characters are in the text; what has none waits for its character."""
        end, shown = 0, self._shown
        for number, position in enumerate(self._held, 1):
            shown += len(_text_of(position))
            if shown > self._length:
                break
            if _text_of(position):
                end, self._shown = number, shown
        given, self._held = self._held[:end], self._held[end:]
        return given

    def _up_to_the_text(self) -> list[Position]:
        """The last ones before a stop text, which may begin within a token."""
        given = self._before_the_text()
        if self._held and self._shown < self._length:
            token, own = next(iter(self._held[0].items()))
            text = _text_of(self._held[0])[: self._length - self._shown]
            given.append(Position({**self._held[0], token: replace(own, decoded_token=text)}))
        return given


def _text_of(position: Position) -> str:
    return next(iter(position.values())).decoded_token or ""


@lru_cache(maxsize=2)
def _specials(tokenizer: Any) -> frozenset[int]:
    """The tokens that a detokenizer leaves out."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(
        [*getattr(tokenizer, "all_special_ids", ())]
        + [token for token, one in added.items() if one.special]
    )


def install(app: Any) -> None:
    """Have the app's three endpoints take the positions for what they are; vLLM looks for one of
    each token of an output.
    """
    for api, name, positions in (
        ("chat", "_create_chat_logprobs", "top_logprobs"),
        ("completion", "_create_completion_logprobs", "top_logprobs"),
        ("responses", "_create_response_logprobs", "logprobs"),
    ):
        if (serving := getattr(app.state, f"openai_serving_{api}", None)) is not None:
            setattr(serving, name, partial(_created, getattr(serving, name), positions))


def _created(
    create: Callable[..., Any], positions: str, *, token_ids: Sequence[int], **more: Any
) -> Any:
    named = [
        next(iter(one)) if isinstance(one, Position) else token_ids[at]
        for at, one in enumerate(more[positions])
        if isinstance(one, Position) or at < len(token_ids)  # a beam has one more at its end
    ]
    return create(token_ids=named, **more)
