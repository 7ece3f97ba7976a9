"""The items of a response's input as vLLM reads them. It knows messages, reasoning, and calls of
functions and custom tools; here the others become these. Pure.

A compaction stands for what was said before it: a summary that the model has written, in a seal
that clients pass on unread. It is no secret from the client, whose conversation it is.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

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
