"""Anthropic's messages by vLLM's own route, which streams a chat and turns its chunks into events.

An unstreamed message is what the events of a stream make, so both are the same by construction;
vLLM's own would fail on a call whose arguments are cut.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from pydantic import TypeAdapter
from vllm.entrypoints.anthropic.protocol import (
    AnthropicMessagesRequest,
    AnthropicMessagesResponse,
)

from workers.engine_plugin import wrap

_PARTS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}


_partial = partial(TypeAdapter(dict[str, Any]).validate_json, experimental_allow_partial=True)


class _Message(AnthropicMessagesResponse):  # type: ignore[misc]
    """A message that is written as it was made, with what is null in it."""

    made: dict[str, Any]

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return self.made


async def install(app: Any) -> None:
    serving = getattr(app.state, "anthropic_serving_messages", None)
    if serving is None:
        return
    wrap(AnthropicMessagesResponse, "model_post_init", _named)
    longest: int = serving.model_config.max_model_len
    serving.create_messages = partial(_created_message, serving.create_messages, longest)
    # With the first request that needs it, vLLM would use up ids of that request.
    await serving._get_disabled_thinking_effort()


def _named(init: Any, message: Any, context: Any) -> None:
    init(message, context)
    message.id = message.id.replace("chatcmpl-", "msg_")


async def _created_message(
    create: Callable[..., Awaitable[Any]],
    longest: int,
    request: AnthropicMessagesRequest,
    raw_request: Any,
) -> Any:
    """The limit of an answer is cut to the model's context. A budget for thinking is not enforced:
    an answer could not be continued with it.
    """
    thinking = request.thinking
    taken = {
        "stream": True,
        "max_tokens": min(request.max_tokens, longest),
        "thinking": None if thinking is not None and thinking.type == "enabled" else thinking,
    }
    made = await create(request.model_copy(update=taken), raw_request)
    if request.stream or not hasattr(made, "__aiter__"):  # or it is an error
        return made
    return await _message_of(made)


async def _message_of(events: AsyncIterator[str]) -> _Message:
    """The message that the events of a stream make."""
    message: dict[str, Any] = {}
    parts: dict[tuple[int, str], list[str]] = {}
    async for event in events:
        found = json.loads(event.partition("\ndata: ")[2])
        match found["type"]:
            case "message_start":
                message = found["message"]
            case "content_block_start":
                message["content"].append(found["content_block"])
            case "content_block_delta":
                its = _PARTS[found["delta"]["type"]]
                parts.setdefault((found["index"], its), []).append(found["delta"][its])
            case "message_delta":
                message.update(found["delta"], usage=found["usage"])
            case "error":
                raise RuntimeError(found["error"]["message"])
    for (index, its), texts in parts.items():
        text = "".join(texts)
        if its == "partial_json":  # that of the last call may be cut
            message["content"][index]["input"] = _partial(text)
        else:
            message["content"][index][its] = text
    whole: _Message = _Message.model_construct(id=message["id"], made=message)
    return whole
