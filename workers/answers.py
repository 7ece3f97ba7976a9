"""An answer is the same, streamed or not, where vLLM makes both in different ways; and its log
probabilities are those of its text.

A tool call that the end of an answer has cut: of the whole text, vLLM's parsers make a call or, if
it is not complete, text with the markup in it. Of its pieces they make what there is of the call.
The pieces count, however they are merged. The echo of a message in parts: vLLM's stream cannot
write it.

It calls the model as its request did.

Each position of log probabilities comes with its text, and what is not in the text has none. vLLM
has one for every token: for the end token, too, for special tokens that it does not show, for a
stop text, and before a text that it holds back.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

from vllm.entrypoints.generate.base.protocol import FunctionCall
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser.abstract_parser import Parser
from vllm.sampling_params import SamplingParams
from vllm.tool_parsers.abstract_tool_parser import ToolParser

from workers.attempt import current
from workers.engine_plugin import wrap

_FEEDS = 256
"""In how many pieces an answer is parsed at most: parsers read all that came before with each."""

Parsed = tuple[str | None, str | None, list[FunctionCall] | None]
"""Reasoning, content and calls, as `Parser.parse` returns them."""


class Pieced(NamedTuple):
    """One of the `n` answers, and how the engine gave it.

    `sizes`: characters and tokens of each output, one after the other.
    """

    answer: CompletionOutput
    sizes: array[int]
    prompt_token_ids: list[int]

    def pieces(self) -> Iterator[tuple[str, list[int], bool]]:
        """Text and tokens of one or more outputs, and whether they are the last."""
        step = 2 * -(-len(self.sizes) // (2 * _FEEDS))
        characters = tokens = 0
        for begin in range(0, len(self.sizes), step):
            some = self.sizes[begin : begin + step]
            text = self.answer.text[characters : (characters := characters + sum(some[::2]))]
            token_ids = self.answer.token_ids[tokens : (tokens := tokens + sum(some[1::2]))]
            yield text, [*token_ids], begin + step >= len(self.sizes)

    def is_cut(self, stop_token_ids: Sequence[int] | None) -> bool:
        """Whether the model would have gone on: its own end tokens are not the client's."""
        stop = self.answer.stop_reason
        ends = isinstance(stop, str) or stop in (stop_token_ids or ())
        return self.answer.finish_reason != "stop" or ends


_answers: ContextVar[Sequence[Pieced]] = ContextVar("hermes_answers", default=())
"""Of the unstreamed request that the running task serves, by their index."""


async def merged(
    deltas: AsyncIterator[RequestOutput], params: SamplingParams
) -> RequestOutput | None:
    """All outputs of a generation in one; None if there are none."""
    whole: RequestOutput | None = None
    sizes: dict[int, array[int]] = {}
    async for output in deltas:
        for item in output.outputs:
            of_it = sizes.setdefault(item.index, array("I"))
            of_it.extend((len(item.text), len(item.token_ids)))
        if whole is None:
            whole = output
        else:
            whole.add(output, aggregate=True)
    if whole is not None:
        whole.outputs.sort(key=lambda item: item.index)
    if whole is not None and params.detokenize:  # a step of a beam search is no answer
        prompt = list(whole.prompt_token_ids or ())
        _answers.set([Pieced(item, sizes[item.index], prompt) for item in whole.outputs])
    return whole


def install(app: Any) -> None:
    """Have the app's chat completions and responses go by the pieces, its three endpoints take
    positions for what they are (vLLM looks for one of each token of an output), and all call the
    model as they were asked.
    """
    wrap(ToolParser, "get_remaining_unstreamed_args", _rest_of_the_arguments)
    models = app.state.openai_serving_models
    models.model_name = partial(_called, models.model_name)
    if (chat := getattr(app.state, "openai_serving_chat", None)) is not None:
        chat.parser_cls = _by_pieces(chat.parser_cls)
        chat.chat_completion_full_generator = partial(_whole, chat.chat_completion_full_generator)
        stream = chat.chat_completion_stream_generator
        chat.chat_completion_stream_generator = partial(_streamed, stream)
    if (responses := getattr(app.state, "openai_serving_responses", None)) is not None:
        responses.parser = _by_pieces(responses.parser)
    for api, name, positions in (
        ("chat", "_create_chat_logprobs", "top_logprobs"),
        ("completion", "_create_completion_logprobs", "top_logprobs"),
        ("responses", "_create_response_logprobs", "logprobs"),
    ):
        if (serving := getattr(app.state, f"openai_serving_{api}", None)) is not None:
            setattr(serving, name, partial(_created, getattr(serving, name), positions))


def _called(name: Callable[..., str], *args: Any) -> str:
    attempt = current.get()
    return attempt.facts.alias if attempt and attempt.facts.alias else name(*args)


def _rest_of_the_arguments(rest: Callable[..., str], parser: ToolParser) -> str:
    """What a stream's last delta adds to a call that begins in it. If the call was cut before its
    arguments, vLLM adds `{}`, and a client would call the function with none.
    """
    calls = parser.prev_tool_call_arr
    return rest(parser) if calls and "arguments" in calls[-1] else ""


def _by_pieces(parser: type[Parser] | None) -> type[Parser] | None:
    if parser is None:
        return None

    class ByPieces(parser):  # type: ignore[misc, valid-type]
        def parse(
            self,
            model_output: str,
            request: Any,
            enable_auto_tools: bool = False,
            model_output_token_ids: Sequence[int] = (),
        ) -> Parsed:
            tools = request.tools and request.tool_choice != "none"
            if tools or self.reasoning_parser is not None:
                token_ids = list(model_output_token_ids)
                for answer in _answers.get():
                    same = [*answer.answer.token_ids] == token_ids
                    if same and answer.is_cut(request.stop_token_ids):
                        return _parsed(self, answer, request)
            return super().parse(  # type: ignore[no-any-return]
                model_output, request, enable_auto_tools, model_output_token_ids
            )

    return ByPieces


def _parsed(parser: Parser, answer: Pieced, request: Any) -> Parsed:
    """What a stream of the answer contains."""
    reasoning, content = "", ""
    calls: dict[int, FunctionCall] = {}
    for text, token_ids, last in answer.pieces():
        delta = parser.parse_delta(text, token_ids, request, answer.prompt_token_ids, finished=last)
        if delta is None:
            continue
        reasoning += delta.reasoning or ""
        content += delta.content or ""
        for part in delta.tool_calls:
            function = part.function
            if function is None:
                continue
            call = calls.setdefault(part.index, FunctionCall(id=part.id, name="", arguments=""))
            call.name += function.name or ""
            call.arguments += function.arguments or ""
    found = [call for _, call in sorted(calls.items()) if call.name]
    said = content or (None if found or reasoning else "")
    return reasoning or None, said, found


def _streamed(stream: Callable[..., Any], *args: Any, **more: Any) -> Any:
    return stream(*_with_an_echo(args), **more)


async def _whole(full: Callable[..., Any], *args: Any, **more: Any) -> Any:
    answer = await full(*_with_an_echo(args), **more)
    if isinstance(answer, ChatCompletionResponse):
        for choice, one in zip(answer.choices, _answers.get(), strict=False):
            reason = one.answer.finish_reason
            if reason not in ("stop", None):  # vLLM: tool_calls, also of a cut call
                choice.finish_reason = reason
    return answer


def _with_an_echo(args: Sequence[Any]) -> Sequence[Any]:
    """The arguments of vLLM's generators; where a template takes parts, the fifth, a conversation,
    ends with some. They read it for the echo alone.
    """
    request, results, request_id, model, conversation, *rest = args
    parts = conversation[-1].get("content") if request.echo and conversation else None
    if isinstance(parts, list):
        said = "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))
        conversation = [*conversation[:-1], {**conversation[-1], "content": said}]
    return request, results, request_id, model, conversation, *rest


# -- log probabilities of the text -----------------------------------------------------------------


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


def _created(
    create: Callable[..., Any], positions: str, *, token_ids: Sequence[int], **more: Any
) -> Any:
    named = [
        next(iter(one)) if isinstance(one, Position) else token_ids[at]
        for at, one in enumerate(more[positions])
        if isinstance(one, Position) or at < len(token_ids)  # a beam has one more at its end
    ]
    return create(token_ids=named, **more)
