"""An agent's loop with OpenAI's unmodified SDK: ten streamed turns with a tool. In every second
turn the engine that writes is killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from scripts.chaos_testing.traffic import Told
from tests.service.disturbance import TooLate, Victims, whole_again
from tests.service.support import Running

pytestmark = [pytest.mark.nightly, pytest.mark.disturbs, pytest.mark.timeout(1800)]
TURNS, KEPT, TRIES = 10, 4, 10
SEARCH: Any = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the web",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
        },
    },
}
Strike = Callable[[str], None]


def _turn(service: Running, messages: Any, strike: Strike) -> tuple[str, dict[str, Any]]:
    """One turn: the id of its request, and the assistant's message."""
    text = arguments = call_id = request_id = ""
    asked = {"model": service.model, "messages": messages, "tools": [SEARCH], "max_tokens": 200}
    create: Any = service.sdk.chat.completions.create
    for chunk in create(**asked, temperature=0, stream=True):
        if not request_id:  # a call shows only when its name is known, and that is late
            request_id = chunk.id.removeprefix("chatcmpl-")
            strike(request_id)
        delta = chunk.choices[0].delta if chunk.choices else None
        text += (delta and delta.content) or ""
        for call in (delta and delta.tool_calls) or ():
            call_id = call.id or call_id
            arguments += (call.function and call.function.arguments) or ""
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    if call_id:
        function = {"name": "search", "arguments": arguments}
        message["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
    return request_id, message


def _struck_turn(
    service: Running, messages: Any, prepare: Callable[[], Strike]
) -> tuple[str, dict[str, Any]]:
    """A turn whose engine is killed while it writes. A turn is short, so one that was faster than
    the fault is asked again.
    """
    for _ in range(TRIES):
        with suppress(TooLate):
            request_id, message = _turn(service, messages, prepare())
            if int(service.state(request_id)["attempts"]) > 1:
                return request_id, message
    pytest.fail(f"{TRIES} times the turn had ended before the fault")


def _follows(message: dict[str, Any], turn: int) -> dict[str, Any]:
    """The tool's result, or the user's next question."""
    if "tool_calls" not in message:
        return {"role": "user", "content": f"Search the web for fact {turn} about lighthouses."}
    (call,) = message["tool_calls"]
    result = f"Result {turn} of {len(call['function']['arguments'])} letters."
    return {"role": "tool", "tool_call_id": call["id"], "content": result}


def _loop(
    service: Running, prepare: Callable[[], Strike] | None
) -> tuple[list[dict[str, Any]], list[str]]:
    """What the assistant said in every turn, and the ids of the requests.

    Args:
        prepare: returns what to do with a request when its first event has come, in every second
            turn.
    """
    messages: list[Any] = [{"role": "user", "content": "Find out why the sky is blue."}]
    said, requests = [], []
    for turn in range(TURNS):
        if prepare is None or turn % 2 == 0:
            request_id, message = _turn(service, messages, lambda _: None)
        else:
            request_id, message = _struck_turn(service, messages, prepare)
        messages += [message, _follows(message, turn)]
        messages = [messages[0], *messages[1:][-KEPT:]]
        said.append(message)
        requests.append(request_id)
    return said, requests


def _without_ids(said: list[dict[str, Any]]) -> list[Any]:
    """The ids of calls are those of their requests."""
    return [
        (one["content"], [call["function"] for call in one.get("tool_calls", ())]) for one in said
    ]


def test_an_agents_loop_does_not_notice_that_engines_die(service: Running) -> None:
    undisturbed, _ = _loop(service, None)
    assert sum("tool_calls" in one for one in undisturbed) >= TURNS // 3

    def prepare() -> Strike:
        whole_again(service, 2)
        victims = Victims(service, "engine")

        def kill(request_id: str) -> None:
            told = Told("", 0, streamed=True, request_id=request_id)
            asyncio.run(victims.kill_busiest([told]))

        return kill

    said, requests = _loop(service, prepare)
    assert _without_ids(said) == _without_ids(undisturbed)
    assert all(service.state(request_id)["state"] == "completed" for request_id in requests)
    whole_again(service, 2)
