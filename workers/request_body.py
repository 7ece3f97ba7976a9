"""A request as vLLM's server takes it: what OpenAI's schema allows and vLLM refuses or misreads is
written otherwise. Pure.

Of the items of a response's input vLLM knows messages, reasoning, and calls of functions and custom
tools; here the others become these. A compaction stands for what was said before it: a summary that
the model has written, in a seal that clients pass on unread. It is no secret from the client, whose
conversation it is.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from serve_app.contract import ANTHROPIC, COMPACT, OF_RESPONSES, called
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
    request: dict[str, Any] = msgspec.json.decode(body)
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
    choice = request.get("tool_choice")
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return
    allowed = choice["allowed_tools"] if within else choice
    names = {called(one) for one in allowed["tools"]}
    request["tools"] = [tool for tool in request["tools"] if called(tool) in names]
    request["tool_choice"] = allowed["mode"]


def _format(wanted: Any, within: str = "") -> Any:
    """An answer's format. `json_object` with a schema, as llama.cpp and others have it, is a schema
    to obey; vLLM would forget it. `within` holds a `json_schema` and its name; in responses no
    field does.
    """
    if not isinstance(wanted, dict) or wanted.get("type") != "json_object":
        return wanted
    if (schema := wanted.get("schema")) is None:
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


# -- the items of a response's input ---------------------------------------------------------------

SUMMARISE = (
    "Summarise this conversation for whoever goes on with it without having read it. State what "
    "the user wants, what was decided, done and found out (with names, paths, numbers and errors "
    "as they are), what is being done now, and what is left to do. Write the summary alone, and "
    "call no tool."
)
_BEFORE = "A summary of the conversation so far:\n\n"
_SEAL = "hs1."
_COMPACTIONS = ("compaction", "compaction_summary")
TRIGGER = "compaction_trigger"
_KEPT_ROLES = ("user", "system", "developer")
_UNFINISHED = ("in_progress", "incomplete")
"""States of an answer that vLLM continues; it does so only if the answer is in parts."""
_CALLS = ("local_shell_call", "shell_call", "apply_patch_call", "tool_search_call")
"""Calls of OpenAI's own tools that a client runs, which sends the output as another item."""
_RUN_CALLS = ("web_search_call", "file_search_call", "code_interpreter_call", "mcp_call")
"""Those that OpenAI runs; the item has the output."""
_OUTPUTS = {f"{call}_output" for call in _CALLS} | {"tool_search_output"}
_OF_A_RUN = ("output", "outputs", "results", "error")
_NOT_ASKED = {"id", "type", "call_id", "status", "created_by", "caller", *_OF_A_RUN}


class NotRead(ValueError):
    """An item cannot be read; the message names it."""

    parameter = "input"


def sealed(text: str) -> str:
    """A text as `encrypted_content`."""
    data = text.encode(errors="replace")
    return _SEAL + base64.b64encode(zlib.crc32(data).to_bytes(4) + data).decode()


def opened(content: Any) -> str | None:
    """The text; None if `sealed` has not made this."""
    if not isinstance(content, str) or not content.startswith(_SEAL):
        return None
    try:
        data = base64.b64decode(content.removeprefix(_SEAL), validate=True)
        text = data[4:].decode()
    except ValueError:
        return None
    return text if zlib.crc32(data[4:]).to_bytes(4) == data[:4] else None


def compacts(items: Sequence[Any]) -> bool:
    """Whether a summary is wanted, and no answer."""
    return bool(items) and _kind(items[-1]) == TRIGGER


def as_vllm_reads(items: Sequence[Any]) -> list[Any]:
    """Of what is before the last compaction, only what users and operators have said is read."""
    last = max((at for at, one in enumerate(items) if _kind(one) in _COMPACTIONS), default=0)
    kept = [
        (at, one)
        for at, one in enumerate(items)
        if at >= last or (_kind(one) == "message" and one.get("role") in _KEPT_ROLES)
    ]
    return [made for at, one in kept for made in _item(one, at)]


def _kind(item: Any) -> str:
    return str(item.get("type", "message")) if isinstance(item, dict) else ""


def _item(item: Any, at: int) -> list[Any]:
    kind = _kind(item)
    if kind == "message" and "role" in item:
        return [_message(item)]
    if kind == "reasoning":
        return _reasoning(item)
    if kind in _COMPACTIONS:
        if (text := opened(item.get("encrypted_content"))) is None:
            raise NotRead(f"input[{at}].encrypted_content was not made by this service.")
        return [{"type": "message", "role": "user", "content": _BEFORE + text}]
    if kind == TRIGGER:
        return []
    call_id = str(item.get("call_id") or item.get("id") or f"call_{at}") if kind else ""
    if kind in _CALLS:
        return [_call(item, kind, call_id)]
    if kind in _RUN_CALLS:
        run = next((item[name] for name in _OF_A_RUN if item.get(name)), item.get("status", ""))
        return [_call(item, kind, call_id), _output(run, call_id)]
    if kind in _OUTPUTS:
        given = item.get("output", item.get("tools", item.get("status", "")))
        return [_output(given, call_id)]
    return [item]


def _message(item: Mapping[str, Any]) -> Any:
    """A message needs no type, and an answer of the model is its whole text: vLLM takes the first
    part alone, and fails on a refusal and on no part.
    """
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


def _reasoning(item: Mapping[str, Any]) -> list[Any]:
    """Its text, or what is sealed; of what another service has encrypted, the summary is left."""
    whole = {"summary": [], **item}
    if (content := whole.pop("encrypted_content", None)) is None:
        return [whole]
    if not whole.get("content") and (text := opened(content)):
        whole["content"] = [{"type": "reasoning_text", "text": text}]
    return [whole] if whole.get("content") or whole["summary"] else []


def _call(item: Mapping[str, Any], kind: str, call_id: str) -> Any:
    asked = {name: value for name, value in item.items() if name not in _NOT_ASKED}
    arguments = item["arguments"] if isinstance(item.get("arguments"), str) else _json(asked)
    name = str(item.get("name") or kind.removesuffix("_call"))
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def _output(given: Any, call_id: str) -> Any:
    text = given if isinstance(given, str) else _json(given)
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
