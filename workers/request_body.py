"""A request as vLLM's server takes it: what OpenAI's schema allows and vLLM refuses or misreads is
written otherwise. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from serve_app.contract import ANTHROPIC, COMPACT, OF_RESPONSES, called
from workers.history import SUMMARISE, as_vllm_reads, compacts
from workers.schemas import NotObeyed, prepared

_NULL_HAS_A_MEANING = ("max_tokens",)
"""To vLLM a completion without `max_tokens` has 16 tokens, and with null as many as have room."""
_OF_SEARCHES = ("web_search_call.results", "web_search_call.action.sources")
"""What may be included of calls that nobody here makes, and what vLLM does not know."""
_REWRITTEN = (b"null", b"allowed_tools", b"input_image", b"json_object", b'"fast"')
"""A body for another path than `OF_RESPONSES` that has none of these is handed on as it came. So is
one of Anthropic's protocol: the null in it may be an argument of a call.
"""


def as_vllm_takes(
    path: str, body: bytes, request_id: str, obeyed: Callable[[Any], Any] = prepared
) -> bytes:
    """The body, which has passed the ingress, for vLLM's server.

    A field that is null is left out, in the request and in what the model reads, because vLLM
    refuses null in some fields for which OpenAI documents it. `obeyed` raises `NotObeyed` for a
    JSON schema that the engine's answers would not obey.
    """
    if path in ANTHROPIC:
        return body
    if path not in OF_RESPONSES and not any(word in body for word in _REWRITTEN):
        return body
    request = msgspec.json.decode(body)
    if not isinstance(request, dict):
        return body
    request = {k: v for k, v in request.items() if v is not None or k in _NULL_HAS_A_MEANING}
    if request.get("service_tier") == "fast":
        request["service_tier"] = "priority"
    for name in ("messages", "input"):
        if isinstance(items := request.get(name), list):
            request[name] = [_read(item) for item in items]
    if isinstance(tools := request.get("tools"), list):
        request["tools"] = [_without_nulls(tool) for tool in tools]
    _allow_tools(request, within=path not in OF_RESPONSES)
    if path not in OF_RESPONSES:
        if "response_format" in request:
            request["response_format"] = _format(request["response_format"], "json_schema")
        return msgspec.json.encode(request)
    if isinstance(tools := request.get("tools"), list):
        request["tools"] = [_tool(tool, obeyed) for tool in tools]
    if path == COMPACT and isinstance(text := request.get("input"), str):
        request["input"] = [{"role": "user", "content": text}]
    if isinstance(items := request.get("input"), list):
        if path == COMPACT or compacts(items):
            _have_it_summarised(path, request)
        request["input"] = as_vllm_reads(request["input"])
    if isinstance(text := request.get("text"), dict) and "format" in text:
        request["text"] = {**text, "format": _format(text["format"])}
    if isinstance(include := request.get("include"), list):
        request["include"] = [one for one in include if one not in _OF_SEARCHES]
    # vLLM would answer at once, and keep the response in this process.
    request.pop("background", None)
    request["request_id"] = f"resp_{request_id}"  # vLLM reads the header on other paths only
    return msgspec.json.encode(request)


def _have_it_summarised(path: str, request: dict[str, Any]) -> None:
    """The answer becomes a compaction (`workers/responses.py`). The tools stay in the prompt, as in
    the turns before, whose cache it uses.
    """
    request["input"] = [*request["input"], {"role": "user", "content": SUMMARISE}]
    request |= {"tool_choice": "none", "compacts": path}
    for name in ("text", "include"):
        request.pop(name, None)


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
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind == "namespace" and isinstance(tool.get("tools"), list):
        return {**tool, "tools": [_tool(one, obeyed) for one in tool["tools"]]}
    if kind == "custom":
        return _custom(tool)
    if kind != "function" or tool.get("strict") is not None:
        return tool
    if not isinstance(tool.get("parameters"), dict):
        return tool
    try:
        obeyed(tool["parameters"])
    except NotObeyed:
        return tool
    return {**tool, "strict": True}


def _custom(tool: dict[str, Any]) -> Any:
    """vLLM refuses a grammar, because the input is a text within JSON here: the model reads it."""
    wanted = tool.get("format")
    if not isinstance(wanted, dict) or wanted.get("type") != "grammar":
        return tool
    told = f"The input has the form of this {wanted.get('syntax')} grammar:"
    parts = (tool.get("description"), told, wanted.get("definition"))
    description = "\n\n".join(str(part) for part in parts if part)
    return {**tool, "format": {"type": "text"}, "description": description}
