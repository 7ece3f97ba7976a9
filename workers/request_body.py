"""A request as vLLM's server takes it: what OpenAI's schema allows and vLLM refuses or misreads is
written otherwise. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from serve_app.contract import INPUT_TOKENS, RESPONSES, called
from workers.schemas import NotObeyed, prepared

_RESPONSES = (RESPONSES, INPUT_TOKENS)
_UNFINISHED = ("in_progress", "incomplete")
"""States of an answer that vLLM continues; it does so only if the answer is in parts."""
_NULL_HAS_A_MEANING = ("max_tokens",)
"""To vLLM a completion without `max_tokens` has 16 tokens, and with null as many as have room."""
_REWRITTEN = (b"null", b"allowed_tools", b"input_image", b"json_object")
"""A body for another path than `_RESPONSES` that has none of these is handed on as it came."""


def as_vllm_takes(
    path: str, body: bytes, request_id: str, obeyed: Callable[[Any], Any] = prepared
) -> bytes:
    """The body, which has passed the ingress, for vLLM's server.

    A field that is null is left out, in the request and in what the model reads, because vLLM
    refuses null in some fields for which OpenAI documents it. `obeyed` raises `NotObeyed` for a
    JSON schema that the engine's answers would not obey.
    """
    if path not in _RESPONSES and not any(word in body for word in _REWRITTEN):
        return body
    request = msgspec.json.decode(body)
    if not isinstance(request, dict):
        return body
    request = {k: v for k, v in request.items() if v is not None or k in _NULL_HAS_A_MEANING}
    for name in ("messages", "input"):
        if isinstance(items := request.get(name), list):
            request[name] = [_read(item) for item in items]
    if isinstance(tools := request.get("tools"), list):
        request["tools"] = [_without_nulls(tool) for tool in tools]
    _allow_tools(request, within=path not in _RESPONSES)
    if path not in _RESPONSES:
        if "response_format" in request:
            request["response_format"] = _format(request["response_format"], "json_schema")
        return msgspec.json.encode(request)
    if isinstance(tools := request.get("tools"), list):
        request["tools"] = [_tool(tool, obeyed) for tool in tools]
    if isinstance(items := request.get("input"), list):
        request["input"] = [_item(item) for item in items]
    if isinstance(text := request.get("text"), dict) and "format" in text:
        request["text"] = {**text, "format": _format(text["format"])}
    # vLLM would answer at once, and keep the response in this process.
    request.pop("background", None)
    request["request_id"] = f"resp_{request_id}"  # vLLM reads the header on other paths only
    return msgspec.json.encode(request)


def _without_nulls(item: Any) -> Any:
    return {k: v for k, v in item.items() if v is not None} if isinstance(item, dict) else item


def _read(value: Any) -> Any:
    """A message or an item, with all that is in it. vLLM wants to know how closely to look at a
    picture, also at one in a tool's output.
    """
    if isinstance(value, list):
        return [_read(one) for one in value]
    if not isinstance(value, dict):
        return value
    looked_at = {"detail": "auto"} if value.get("type") == "input_image" else {}
    return {**looked_at, **{k: _read(v) for k, v in value.items() if v is not None}}


def _allow_tools(request: dict[str, Any], within: bool) -> None:
    """Of the tools, leave those that the model is allowed to call. vLLM forgets `allowed_tools`,
    and its parsers would take a call of any tool.
    """
    choice, tools = request.get("tool_choice"), request.get("tools")
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return
    allowed: Any = choice.get("allowed_tools") if within else choice
    names = allowed.get("tools") if isinstance(allowed, dict) else None
    if isinstance(tools, list) and isinstance(names, list):
        found = {called(one) for one in names}
        request["tools"] = [tool for tool in tools if called(tool) in found]
        request["tool_choice"] = allowed.get("mode")


def _format(wanted: Any, within: str = "") -> Any:
    """An answer's format. `json_object` with a schema, as llama.cpp and others have it, is a schema
    to obey; vLLM would forget it. `within` holds a `json_schema` and its name; in responses no
    field does.
    """
    if not isinstance(wanted, dict) or wanted.get("type") != "json_object":
        return wanted
    if not isinstance(schema := wanted.get("schema"), dict):
        return wanted
    found = {"name": "answer", "schema": schema}
    return {"type": "json_schema", **({within: found} if within else found)}


def _tool(tool: Any, obeyed: Callable[[Any], Any]) -> Any:
    """A tool of a response. Of a function that does not say whether it is strict, OpenAI has the
    arguments obey the schema where they can; to vLLM it is not strict.
    """
    if not isinstance(tool, dict) or tool.get("type") != "function" or "strict" in tool:
        return tool
    if not isinstance(tool.get("parameters"), dict):
        return tool
    try:
        obeyed(tool["parameters"])
    except NotObeyed:
        return tool
    return {**tool, "strict": True}


def _item(item: Any) -> Any:
    """An item of a response's input. A message needs no type, and an answer of the model is its
    whole text: vLLM takes the first part alone, and fails on a refusal and on no part.
    """
    if not isinstance(item, dict):
        return item
    if item.get("type") == "reasoning":
        return {"summary": [], **item}
    if item.get("type", "message") != "message" or "role" not in item:
        return item
    parts = item.get("content")
    answered = item["role"] == "assistant" and (item.get("status") not in _UNFINISHED or not parts)
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
