"""A request as vLLM's server takes it: what OpenAI's schema allows and vLLM refuses or misreads is
written otherwise. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from serve_app.contract import INPUT_TOKENS, RESPONSES
from workers.schemas import NotObeyed, prepared

_RESPONSES = (RESPONSES, INPUT_TOKENS)
_UNFINISHED = ("in_progress", "incomplete")
"""States of an answer that vLLM continues; it does so only if the answer is in parts."""
_NULL_HAS_A_MEANING = ("max_tokens",)
"""To vLLM a completion without `max_tokens` has 16 tokens, and with null as many as have room."""


def as_vllm_takes(path: str, body: bytes, request_id: str) -> bytes:
    """The body for vLLM's server.

    A field that is null is left out, in the request and in its messages, because vLLM refuses null
    in some fields for which OpenAI documents it.

    Args:
        body: has passed the ingress.
    """
    if path not in _RESPONSES and b"null" not in body:
        return body
    request = msgspec.json.decode(body)
    if not isinstance(request, dict):
        return body
    request = {k: v for k, v in request.items() if v is not None or k in _NULL_HAS_A_MEANING}
    for name in ("messages", "input", "tools"):
        if isinstance(items := request.get(name), list):
            request[name] = [_without_nulls(item) for item in items]
    if path in _RESPONSES:
        if isinstance(tools := request.get("tools"), list):
            request["tools"] = [_tool(tool) for tool in tools]
        if isinstance(items := request.get("input"), list):
            request["input"] = [_item(item) for item in items]
        # vLLM would answer at once, and keep the response in this process.
        request.pop("background", None)
        request["request_id"] = f"resp_{request_id}"  # vLLM reads the header on other paths only
    return msgspec.json.encode(request)


def _without_nulls(item: Any) -> Any:
    return {k: v for k, v in item.items() if v is not None} if isinstance(item, dict) else item


def _tool(tool: Any) -> Any:
    """A tool of a response. Of a function that does not say whether it is strict, OpenAI has the
    arguments obey the schema where they can; to vLLM it is not strict.
    """
    if not isinstance(tool, dict) or tool.get("type") != "function" or "strict" in tool:
        return tool
    if not isinstance(tool.get("parameters"), dict):
        return tool
    try:
        prepared(tool["parameters"])
    except NotObeyed:
        return tool
    return {**tool, "strict": True}


def _item(item: Any) -> Any:
    """An item of a response's input. A message needs no type, and an answer of the model is its
    whole text: vLLM takes the first part alone, and fails on a refusal.
    """
    if not isinstance(item, dict) or item.get("type", "message") != "message" or "role" not in item:
        return item
    parts = item.get("content")
    answered = item["role"] == "assistant" and item.get("status") not in _UNFINISHED
    if answered and isinstance(parts, list) and all(_text(part) is not None for part in parts):
        text = "".join(str(_text(part)) for part in parts)
        return {"type": "message", "role": "assistant", "content": text}
    return {"type": "message", **item}


def _text(part: Any) -> str | None:
    """The text of a part of an answer; None if it is something else."""
    if not isinstance(part, Mapping):
        return None
    text = part.get("refusal" if part.get("type") == "refusal" else "text")
    known = part.get("type") in ("output_text", "input_text", "text", "refusal")
    return text if known and isinstance(text, str) else None
