"""What vLLM's Responses lack without a store of their own: an earlier response's id, `truncation:
auto` by whole items, the number of an input's tokens, compactions, reasoning that a client keeps,
and some of what a response repeats of its request. And the end of an answer that its limit has cut:
the last item is incomplete, and so is the stream's last event.

The ingress has put the earlier items into the input already (`serve_app/ingress/conversations.py`).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
from openai.types.responses import ResponseCompactionItem, ResponseOutputItemAddedEvent
from vllm.entrypoints.openai.responses import api_router, utils
from vllm.entrypoints.openai.responses.protocol import (
    ResponseCompletedEvent,
    ResponseOutputItemDoneEvent,
    ResponsesRequest,
    ResponsesResponse,
)
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMValidationError
from vllm.tool_parsers.utils import custom_tool_as_function_dict

from serve_app.contract import COMPACT, INPUT_TOKENS
from workers import vllm_failures
from workers.attempt import current
from workers.determinism import id_of_item
from workers.engine_plugin import replace, wrap
from workers.request_body import sealed

_KEPT_ROLES = ("system", "developer")
_RESULTS = ("function_call_output", "custom_tool_call_output", "mcp_approval_response")


class _Earlier(dict[str, Any]):
    """Stands for vLLM's stores of responses and messages: every earlier response is known, and has
    nothing that is not in the input.
    """

    def get(self, key: str, default: Any = None) -> Any:
        return SimpleNamespace(id=key, output=[])


class _Incomplete(ResponseCompletedEvent):  # type: ignore[misc]
    type: Literal["response.incomplete"]


class _Compacted(ResponsesResponse):  # type: ignore[misc]
    """What `POST /v1/responses/compact` answers."""

    def model_dump(self, **options: Any) -> dict[str, Any]:
        whole = super().model_dump(**options)
        _, body = vllm_failures.asked.get()
        said = _said_by_the_user(msgspec.json.decode(body)["input"])
        kept = {name: whole[name] for name in ("id", "created_at", "usage")}
        return {**kept, "object": "response.compaction", "output": [*said, *whole["output"]]}


class _NoMessages(dict[str, Any]):
    def __missing__(self, key: str) -> None:
        return None


def install(app: Any) -> None:
    serving = getattr(app.state, "openai_serving_responses", None)
    if serving is None:
        return
    serving.enable_store = False  # it would keep every response until the process ends
    serving.response_store, serving.msg_store = _Earlier(), _NoMessages()
    render = serving._render_resolved_response_inputs
    longest: int = serving.model_config.max_model_len
    serving._render_resolved_response_inputs = partial(_fitted, render, longest)
    wrap(ResponsesResponse, "from_request", _repeating)
    serving._make_response_output_items = partial(_items, serving._make_response_output_items)
    serving._process_simple_streaming_events = partial(
        _events, serving._process_simple_streaming_events
    )
    replace(utils.decode_custom_tool_input, _input_of_custom)
    replace(custom_tool_as_function_dict, _always_a_text)
    serving.responses_stream_generator = partial(_ended, serving.responses_stream_generator)

    async def input_tokens(request: ResponsesRequest) -> dict[str, Any]:
        found = await serving._render_resolved_response_inputs(request, None)
        if isinstance(found, ErrorResponse):
            raise VLLMValidationError(found.error.message)
        tokens = serving._extract_prompt_len(found.engine_input)
        return {"object": "response.input_tokens", "input_tokens": tokens}

    app.add_api_route(INPUT_TOKENS, input_tokens, methods=["POST"])
    app.add_api_route(COMPACT, api_router.create_responses, methods=["POST"])


def _said_by_the_user(given: str | list[Any]) -> list[Any]:
    """The messages that stay before a compaction, as items of an output."""
    items = given if isinstance(given, list) else [{"role": "user", "content": given}]
    made = []
    for item in items:
        if item.get("type", "message") == "message" and item.get("role") == "user":
            content = item.get("content")
            parts = (
                [{"type": "input_text", "text": content}] if isinstance(content, str) else content
            )
            whole = {"id": id_of_item("msg"), "type": "message", "status": "completed"}
            made.append({**whole, **item, "content": parts})
    return made


def _input_of_custom(decode: Any, arguments: str) -> str:
    """The input of a call of a custom tool; of a call that was cut, what there is of it. vLLM gives
    the markup then.
    """
    if arguments.lstrip().startswith("{") and not _is_json(arguments):
        return str(utils.decode_custom_tool_input_prefix(arguments))
    return str(decode(arguments))


def _always_a_text(make: Any, tool: Any) -> dict[str, Any]:
    """A custom tool as a function, whose arguments are strict, as those of others are."""
    return {**make(tool), "strict": True}


def _repeating(make: Any, request: ResponsesRequest, *args: Any, **options: Any) -> Any:
    """`ResponsesResponse.from_request`, with what the client has set and vLLM does not repeat."""
    response, attempt = make(request, *args, **options), current.get()
    if attempt is not None and attempt.facts.detached:
        response.background = True
    if request.prompt_cache_key is not None:
        response.prompt_cache_key = request.prompt_cache_key
    if (identifier := getattr(request, "safety_identifier", None)) is not None:
        response.safety_identifier = identifier
    if getattr(request, "compacts", None) == COMPACT:
        return _Compacted.model_construct(**response.__dict__)
    return response


def _items(
    make: Callable[..., list[Any]], request: Any, output: Any, *args: Any, **more: Any
) -> Any:
    """The items of a response that is not streamed."""
    items = make(request, output, *args, **more)
    if _compacts(request):
        return [_compaction(items)]
    for item in items:
        _seal(item, request)
    if items:
        _mark(items[-1], output)
    return items


async def _events(
    process: Callable[..., Any], request: Any, params: Any, results: Any, context: Any, *args: Any
) -> AsyncIterator[Any]:
    """The events of a response's items, numbered as they are sent. Which item is the last is known
    when there are no more. A compaction is sent when it is whole.
    """
    *others, numbered = args
    last: Any = None
    made = process(request, params, results, context, *others, lambda event: event)
    async with aclosing(made) as events:
        async for event in events:
            if _compacts(request):
                continue
            if last is not None:
                yield numbered(last)
            last = event if isinstance(event, ResponseOutputItemDoneEvent) else None
            if last is None:
                yield numbered(event)
            else:
                _seal(last.item, request)
    if last is not None:
        _mark(last.item, context.last_output.outputs[0])
        yield numbered(last)
    if _compacts(request):
        items = context.streamed_output_items = [_compaction(context.streamed_output_items)]
        whole = {"sequence_number": -1, "output_index": 0, "item": items[0]}
        yield numbered(ResponseOutputItemAddedEvent(type="response.output_item.added", **whole))
        yield numbered(ResponseOutputItemDoneEvent(type="response.output_item.done", **whole))


def _compacts(request: Any) -> bool:
    return getattr(request, "compacts", None) is not None


def _compaction(items: Sequence[Any]) -> ResponseCompactionItem:
    """What the model has written, as an item; what it only thought, if that is all."""
    said = {item.type: item.content[0].text for item in items if getattr(item, "content", None)}
    if not (text := said.get("message") or said.get("reasoning")):
        raise RuntimeError("the model wrote no summary")
    sealed_text, name = sealed(text), id_of_item("cmp")
    return ResponseCompactionItem(id=name, type="compaction", encrypted_content=sealed_text)


def _seal(item: Any, request: Any) -> None:
    if item.type == "reasoning" and "reasoning.encrypted_content" in (request.include or ()):
        item.encrypted_content = sealed("".join(part.text for part in item.content or ()))


def _mark(item: Any, output: Any) -> None:
    """The last item of a response is incomplete if the answer was cut in it. A call is if its
    arguments are; that may be by a stop text, too.
    """
    if item.type == "function_call":
        cut = output.finish_reason != "stop" or isinstance(output.stop_reason, str)
        if not cut or _is_json(item.arguments):
            return
    elif output.finish_reason != "length":
        return
    if hasattr(item, "status"):
        item.status = "incomplete"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


async def _ended(stream: Callable[..., Any], *args: Any, **more: Any) -> AsyncIterator[Any]:
    """vLLM ends every stream in `response.completed`."""
    async with aclosing(stream(*args, **more)) as events:
        async for event in events:
            if isinstance(event, ResponseCompletedEvent) and event.response.status == "incomplete":
                yield _Incomplete(
                    type="response.incomplete",
                    sequence_number=event.sequence_number,
                    response=event.response,
                )
            else:
                yield event


async def _fitted(
    render: Any, longest: int, request: ResponsesRequest, earlier: Any, **options: Any
) -> Any:
    """Render a request. With `truncation: auto`, its oldest items are left out until the prompt and
    the answer fit; vLLM alone would cut into the first tokens, a system prompt included. What no
    item less can make fit is refused.
    """
    if request.truncation != "auto":
        return await render(request, earlier, **options)
    room = longest - max(1, request.max_output_tokens or 1)

    def with_input(items: Any) -> ResponsesRequest:
        return request.model_copy(update={"truncation": "disabled", "input": items})

    async def fitting(items: Any) -> Any:
        """None if it does not fit. An error, which is the answer, does."""
        try:
            made = await render(with_input(items), earlier, **options)
        except VLLMValidationError as error:
            if "context length" not in str(error):
                raise
            return None
        if isinstance(made, ErrorResponse):
            return made
        return made if len(made.engine_input.get("prompt_token_ids", ())) <= room else None

    found = await fitting(request.input)
    items = request.input if isinstance(request.input, list) else []
    begins: list[int] = []
    if found is None:  # not with a result, whose call would be missing
        begins = [at for at in range(1, len(items)) if _of(items[at], "type") not in _RESULTS]
    while begins:  # fewer items are fewer tokens
        middle = len(begins) // 2
        if (less := await fitting(_from(items, begins[middle]))) is not None:
            found, begins = less, begins[:middle]
        else:
            begins = begins[middle + 1 :]
    if found is not None:
        return found
    return await render(with_input(request.input), earlier, **options)


def _from(items: Sequence[Any], begin: int) -> list[Any]:
    """The rest of an input, behind what the operator has said before it."""
    said = [item for item in items[:begin] if _of(item, "role") in _KEPT_ROLES]
    return [*said, *items[begin:]]


def _of(item: Any, name: str) -> Any:
    return item.get(name) if isinstance(item, dict) else getattr(item, name, None)
