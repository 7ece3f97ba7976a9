"""An agent's loop with OpenAI's unmodified SDK: ten streamed turns that each call a tool. In every
second turn the engine that writes is killed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from scripts.chaos_testing.parts import Parts
from scripts.chaos_testing.traffic import Told
from tests.service.disturbance import Victims, whole_again
from tests.service.support import Running

pytestmark = [pytest.mark.nightly, pytest.mark.disturbs, pytest.mark.timeout(1800)]
TURNS, KEPT = 10, 2
SEARCH: Any = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the web",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "minLength": 150, "maxLength": 200}},
            "required": ["query"],
            "additionalProperties": False,
        },
    },
}
FORCED: Any = {"type": "function", "function": {"name": "search"}}


def _turn(service: Running, messages: Any, strike: Callable[[str], None]) -> tuple[str, Any]:
    """One turn: the id of its request, and the assistant's message."""
    arguments = call_id = request_id = ""
    for chunk in service.sdk.chat.completions.create(
        model=service.model,
        messages=messages,
        tools=[SEARCH],
        tool_choice=FORCED,
        temperature=0,
        max_tokens=400,
        stream=True,
    ):
        request_id = chunk.id.removeprefix("chatcmpl-")
        for call in chunk.choices[0].delta.tool_calls or () if chunk.choices else ():
            call_id = call.id or call_id
            if call.function and call.function.arguments:
                if not arguments:
                    strike(request_id)
                arguments += call.function.arguments
    function = {"name": "search", "arguments": arguments}
    made = {"id": call_id, "type": "function", "function": function}
    return request_id, {"role": "assistant", "content": None, "tool_calls": [made]}


def _loop(
    service: Running, prepare: Callable[[int], Callable[[str], None]]
) -> tuple[list[str], list[str]]:
    """The arguments of every call, and the ids of the requests.

    Args:
        prepare: for a turn, what to do with its request when the first arguments have come.
    """
    messages: list[Any] = [{"role": "user", "content": "Find out why the sky is blue."}]
    calls, requests = [], []
    for turn in range(TURNS):
        request_id, answer = _turn(service, messages, prepare(turn))
        call = answer["tool_calls"][0]
        result = f"Result {turn} has {len(call['function']['arguments'])} letters."
        messages += [answer, {"role": "tool", "tool_call_id": call["id"], "content": result}]
        messages = [messages[0], *messages[1:][-KEPT * 2 :]]
        calls.append(call["function"]["arguments"])
        requests.append(request_id)
    return calls, requests


def _let_be(_: str) -> None:
    pass


def test_an_agents_loop_does_not_notice_that_engines_die(service: Running) -> None:
    undisturbed, _ = _loop(service, lambda _: _let_be)
    assert all(150 <= len(json.loads(call)["query"]) <= 200 for call in undisturbed)

    def prepare(turn: int) -> Callable[[str], None]:
        if turn % 2 == 0:
            return _let_be
        whole_again(service, 2)
        victims = Victims(service, "engine")

        def kill(request_id: str) -> None:
            told = Told("", 0, streamed=True, request_id=request_id)
            Parts(service.service).kill(asyncio.run(victims.busiest([told])))

        return kill

    calls, requests = _loop(service, prepare)
    assert calls == undisturbed
    states = [service.state(request_id) for request_id in requests]
    assert all(state["state"] == "completed" for state in states)
    assert [int(state["attempts"]) > 1 for state in states] == [bool(n % 2) for n in range(TURNS)]
    whole_again(service, 2)
