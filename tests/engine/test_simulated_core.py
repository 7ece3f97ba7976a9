"""The simulated engine under vLLM's own server: what is vLLM's, what is refused, an attempt that
goes on behind the tokens of one before it, and the engine's death.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import msgspec
import pytest

pytest.importorskip("vllm")

from vllm.v1.engine.exceptions import EngineDeadError

from serve_app.observability.metrics import Telemetry
from serve_app.settings import load_settings
from tests.engine.resume_helpers import ARGS, EngineThread, Written, attempt, request
from workers.simulated_engine import SimulatedVllm

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
FAULTS = {"DIE": "fail"}


class Simulated(EngineThread):
    """The same world, whose engine has no core."""

    def __init__(self) -> None:
        args = {"tokens_per_s": 1_000.0, "vllm": ARGS, "faults": FAULTS}
        self.engine = SimulatedVllm(load_settings({"engine": {"kind": "simulated", "args": args}}))
        self.telemetry, self._core = Telemetry(), None
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.generated_tokens = Counter()
        self.priorities, self.pauses = {}, WeakSet()
        self.engine.progress.on_step = self._stepped
        self.run(self.engine.start(), 600)
        self._count()


@pytest.fixture(scope="module")
def simulated() -> Iterator[Simulated]:
    made = Simulated()
    yield made
    made.close()


def ask(world: Simulated, path: str, **body: Any) -> Written:
    return world.run(attempt(world, [request(path, {"model": "hermes-tiny", **body})]))


def said(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 40}


def test_chats_responses_and_tools_are_vllms(simulated: Simulated) -> None:
    function = {"name": "f", "parameters": {"type": "object"}}
    chat = msgspec.json.decode(
        ask(
            simulated, CHAT, **said("Hello"), tools=[{"type": "function", "function": function}]
        ).body
    )
    assert chat["usage"]["completion_tokens"] == 40
    assert "-1 " in chat["choices"][0]["message"]["content"]
    made = ask(simulated, RESPONSES, input="Hello", max_output_tokens=40)
    assert msgspec.json.decode(made.body)["output"][0]["type"] == "message"


def test_what_it_has_not_is_refused(simulated: Simulated) -> None:
    refused = ask(simulated, CHAT, **said("Hello"), logprobs=True, top_logprobs=2)
    assert refused.attempt.failure is not None


def test_an_answer_goes_on_behind_its_tokens(simulated: Simulated) -> None:
    body = {"model": "hermes-tiny", **said("Hello"), "stream": True}
    whole = simulated.run(attempt(simulated, [request(CHAT, body)]))
    cut = whole.entries[: len(whole.entries) // 2]
    resumed = simulated.run(attempt(simulated, cut))
    assert resumed.body == whole.body
    assert 0 < resumed.generated_tokens < whole.generated_tokens


def test_it_dies_when_it_is_told_to(simulated: Simulated) -> None:
    assert ask(simulated, CHAT, **said("DIE")).attempt.engine_failed
    with pytest.raises(EngineDeadError):
        simulated.run(simulated.engine.check_health())
