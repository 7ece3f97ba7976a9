"""What a client gets from a response, however vLLM cut it into events.

vLLM puts tokens into one event if its server app has not taken the earlier ones yet. So two
responses of the same tokens may differ in their bytes on a busy machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def same(one: bytes, other: bytes) -> bool:
    """Whether two responses have the same bytes, or are streams that vLLM cut differently and that
    contain the same.
    """
    return one == other or (cuts(one) != cuts(other) and content(one) == content(other))


def cuts(body: bytes) -> list[list[tuple[str, Any]]]:
    """The texts of each event of a stream; none if it is no stream."""
    if not body.startswith(b"id: 1\n"):
        return []
    return [
        list(take_texts(None if data == "[DONE]" else json.loads(data))) for _, data in events(body)
    ]


def events(body: bytes) -> list[tuple[int, str]]:
    """Numbers and data of a stream's events."""
    found = []
    for event in body.decode().split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in event.split("\n") if line)
        found.append((int(lines["id"]), lines["data"]))
    return found


def content(body: bytes) -> Any:
    """What a client gets from a response: joined deltas; everything else unchanged."""
    if not body.startswith(b"id: 1\n"):
        return json.loads(body)
    numbered = events(body)
    assert [number for number, _ in numbered] == list(range(1, len(numbered) + 1))
    joined: list[list[Any]] = []
    lists: dict[str, list[Any]] = {}
    for _, data in numbered:
        event = None if data == "[DONE]" else json.loads(data)
        for kind, text in take_texts(event):
            if isinstance(text, list):
                lists.setdefault(kind, []).extend(text)
            elif joined and joined[-1][0] == kind:
                joined[-1][1] += text
            else:
                joined.append([kind, text])
        if not says_nothing(event):
            joined.append(["event", event])
    return [*joined, ["lists", lists]] if lists else joined


def each_choice(body: bytes) -> Any:
    """The content of a response for each of its choices, which a stream mixes as the engine gives
    them.
    """
    if not body.startswith(b"id: 1\n"):
        return json.loads(body)
    apart: dict[int, list[Any]] = {}
    for _, data in events(body):
        event: dict[str, Any] = {"object": "the end"} if data == "[DONE]" else json.loads(data)
        choices = event.get("choices") or [{"index": -1}]
        for choice in choices:
            alone = {**event, "choices": [choice]} if choice["index"] >= 0 else event
            apart.setdefault(choice["index"], []).append(alone)
    return {
        index: content(
            b"".join(
                b"id: %d\ndata: %s\n\n" % (number, json.dumps(event).encode())
                for number, event in enumerate(found, 1)
            )
        )
        for index, found in apart.items()
    }


def alike(one: Any, other: Any) -> bool:
    """Whether two contents are equal, log probabilities up to their rounding: an engine that has
    computed the same tokens in other batches gives other last digits.
    """
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 1e-3
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def take_texts(event: Any) -> Iterator[tuple[str, Any]]:
    """Takes the texts and lists that go on from event to event out of an event, in the order in
    which they belong, and what numbers the event.
    """
    if not isinstance(event, dict):
        return
    event.pop("sequence_number", None)
    if str(event.get("type", "")).endswith(".delta"):
        yield f"logprobs {event.get('item_id')}", event.pop("logprobs", None) or []
        yield f"{event['type']} {event.get('item_id')}", str(event.pop("delta"))
    if event.get("type") == "content_block_delta":
        for name in event["delta"].keys() - {"type"}:
            yield f"{name} {event['index']}", event["delta"].pop(name)
    for choice in event.get("choices", ()):
        choice.pop("token_ids", None)
        logprobs = choice.pop("logprobs", None) or {}
        yield from ((name, values) for name, values in logprobs.items() if values)
        delta = choice.get("delta", choice)
        for name in ("reasoning", "content", "text"):
            if (
                isinstance(delta.get(name), str)
                and "role" not in delta
                and (text := delta.pop(name))
            ):
                yield name, text
        calls = delta.pop("tool_calls", None) or []
        for call in list(calls):
            # In a list, because they come with the call's name or behind it.
            yield f"arguments {call['index']}", list(call["function"].pop("arguments", None) or "")
            if not (call["function"] or "id" in call):
                calls.remove(call)
        if calls:
            delta["tool_calls"] = calls
        for name in [name for name, value in delta.items() if value is None]:
            del delta[name]


def says_nothing(event: Any) -> bool:
    """Whether an event contained nothing except its texts."""
    if not isinstance(event, dict):
        return False
    if str(event.get("type", "")).endswith((".delta", "_block_delta")):
        return True
    choices = event.get("choices") or []
    return bool(choices) and all(
        choice.get("finish_reason") is None and not any((choice.get("delta") or {}).values())
        for choice in choices
    )
