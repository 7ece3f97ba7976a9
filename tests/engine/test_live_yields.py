"""Long answers of the real engine that yield to short requests equal the unbroken ones: dispatcher,
worker, Redis, vLLM and its serving layer are real.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm")

from serve_app.journal.entries import transcript
from tests.engine.resume_helpers import ARGS
from tests.journal.yielding import YieldingService, ended, has_output, service
from tests.waiting import eventually

MODEL = "hermes-tiny"
TOKENS = 1_200


async def text(its: YieldingService, name: str) -> list[str]:
    """What an answer says, and why it has ended. How many tokens an event holds differs."""
    (last,) = [entry for entry in await its.w.entries(name) if entry.terminal]
    found = transcript(last)
    assert found is not None, (last.state, last.reason)
    if not found.startswith(b"id: 1"):
        choice = json.loads(found)["choices"][0]
        return [choice["message"]["content"], choice["finish_reason"]]
    data = [event.split("data: ", 1)[1] for event in found.decode().split("\n\n") if event]
    choices = [json.loads(one)["choices"][0] for one in data[:-1]]
    reasons = [one["finish_reason"] for one in choices if one["finish_reason"]]
    return ["".join(one["delta"].get("content") or "" for one in choices), *reasons]


@pytest.mark.clock  # the long answer must still run when each short one has ended
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_long_answer_yields_three_times_and_is_the_unbroken_one(
    redis_url: str, namespace: str, stream: bool
) -> None:
    more: dict[str, Any] = {"model": MODEL, "temperature": 0, "ignore_eos": True}
    engine = {"kind": "vllm", "args": ARGS}
    async with service(redis_url, namespace, engine) as its, its.ingress("ingress-1"):
        await its.admit("long", TOKENS, "batch", stream=stream, **more)
        for number in range(3):
            await eventually(partial(has_output, its, "long", number + 1))
            await its.admit(f"short-{number}", 4, "realtime", **more)
            await ended(its, f"short-{number}")
        await ended(its, "long")
        assert [call for call in its.calls if call[0] == "long"] == [
            ("long", epoch) for epoch in (1, 2, 3, 4)
        ]
        await its.admit("whole", TOKENS, "batch", stream=stream, **more)
        await ended(its, "whole")
        long = await text(its, "long")
        assert long == await text(its, "whole")
        assert long[1:] == ["length"]
