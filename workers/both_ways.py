"""An unstreamed answer is the streamed one, where vLLM makes them in different ways.

A tool call that the end of an answer has cut: of the whole text, vLLM's parsers make a call or, if
it is not complete, text with the markup in it. Of its pieces they make what there is of the call.
The pieces count.

The echo of a message in parts, which vLLM's stream cannot write.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

from vllm.entrypoints.generate.base.protocol import FunctionCall
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser.abstract_parser import Parser
from vllm.sampling_params import SamplingParams

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
    """Have the app's chat completions and responses go by the pieces."""
    if (chat := getattr(app.state, "openai_serving_chat", None)) is not None:
        chat.parser_cls = _by_pieces(chat.parser_cls)
        chat.chat_completion_full_generator = partial(_whole, chat.chat_completion_full_generator)
        stream = chat.chat_completion_stream_generator
        chat.chat_completion_stream_generator = partial(_streamed, stream)
    if (responses := getattr(app.state, "openai_serving_responses", None)) is not None:
        responses.parser = _by_pieces(responses.parser)


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
