"""What a client has at the end of an answer, streamed or not, in one form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def choices(path: str, body: bytes) -> list[Any]:
    """Of a chat completion or a completion, by their index: texts, calls, log probabilities, token
    ids and how it ended. The output items of a response, and its status. Names are left out.
    """
    if path.endswith("/responses"):
        return _items(body)
    if body.startswith(b"{"):
        return [_plain(one) for one in json.loads(body)["choices"]]
    found: dict[int, dict[str, Any]] = {}
    for event in told(body):
        for part in event["choices"]:
            _add(found.setdefault(part["index"], _nothing()), part)
    return [one for _, one in sorted(found.items())]


def told(body: bytes) -> Iterator[dict[str, Any]]:
    """What the numbered events of a stream say."""
    for event in body.split(b"\n\n"):
        head, _, data = event.partition(b"data: ")
        if b"id: " in head and data != b"[DONE]":
            yield json.loads(data)


def _items(body: bytes) -> list[Any]:
    if body.startswith(b"{"):
        response = json.loads(body)
    else:
        *_, last = told(body)
        assert last["type"] == f"response.{last['response']['status']}"
        response = last["response"]
    for item in response["output"]:
        for name in ("async", "caller", "id", "call_id"):
            item.pop(name, None)
        if item["type"] == "reasoning":  # a stream says "completed", where the other says nothing
            item["status"] = item["status"] if item["status"] == "incomplete" else None
    return [response["status"], response["incomplete_details"], *response["output"]]


def _nothing() -> dict[str, Any]:
    texts = {"content": "", "reasoning": ""}
    return {**texts, "calls": {}, "logprobs": {}, "token_ids": [], "ended": None}


def _plain(choice: dict[str, Any]) -> dict[str, Any]:
    one = _nothing()
    calls = choice.get("message", {}).get("tool_calls") or ()
    parts = [{**call, "index": index} for index, call in enumerate(calls)]
    message = {**choice.get("message", {}), "tool_calls": parts}
    _add(one, {**choice, "delta": message} if "message" in choice else choice)
    return one


def _add(one: dict[str, Any], part: dict[str, Any]) -> None:
    delta = part.get("delta", part)
    one["content"] += delta.get("content") or part.get("text") or ""
    one["reasoning"] += delta.get("reasoning") or ""
    for call in delta.get("tool_calls") or ():
        known = one["calls"].setdefault(call["index"], {"arguments": ""})
        known["name"] = known.get("name") or call["function"].get("name")
        known["arguments"] += call["function"].get("arguments") or ""
    for name, values in (part.get("logprobs") or {}).items():
        one["logprobs"][name] = one["logprobs"].get(name, []) + (values or [])
    one["token_ids"] += part.get("token_ids") or []
    if part.get("finish_reason"):
        one["ended"] = part["finish_reason"], part.get("stop_reason")


def unlike_its_text(path: str, said: list[Any]) -> list[tuple[str, str]]:
    """Texts with log probabilities whose tokens do not join to them."""
    if path.endswith("/responses"):
        parts = [part for item in said[2:] for part in item.get("content") or ()]
        with_tokens = [(one["text"], one["logprobs"]) for one in parts if one.get("logprobs")]
    else:
        with_tokens = [
            (one["content"], one["logprobs"].get("content") or one["logprobs"].get("tokens"))
            for one in said
            if one["logprobs"]
        ]
    found = []
    for text, tokens in with_tokens:
        if isinstance(tokens[0], str):  # of a completion
            joined = "".join(tokens)
        else:
            joined = "".join(one["token"] for one in tokens)
            assert joined.encode() == bytes(byte for one in tokens for byte in one["bytes"])
        if joined != text:
            found.append((text, joined))
    return found
