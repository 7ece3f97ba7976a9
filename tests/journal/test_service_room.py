"""A whole service whose engine has little memory: requests wait in the ingress, not in the engine,
and what can never fit is refused before it waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from serve_app.contract import Answer
from tests.journal.in_process import WORKER, in_process, settings_of
from tests.waiting import eventually
from workers.simulated_engine import SimulatedEngine

MODEL = {
    "name": "small",
    "timing": {"step_ms": 2.0},
    "num_gpu_blocks": 64,
    "block_size": 16,
    "max_model_len": 600,
}
"""It holds 1,024 tokens."""
REQUESTS = 12


class WaitingEngine(SimulatedEngine):
    """Makes its first step when told to, with all requests there, however slowly they come."""

    async def start(self) -> None:
        """Nothing yet."""

    async def go(self) -> None:
        """Start stepping."""
        await super().start()


@pytest.mark.parametrize("kv_room", [True, False])
async def test_requests_wait_for_room_in_the_engines_memory(
    redis_url: str, namespace: str, kv_room: bool
) -> None:
    engine = {"kind": "simulated", "args": {"engine_model": MODEL}}
    settings = settings_of(redis_url, namespace, engine=engine, order={"kv_room": kv_room})
    its_engine = WaitingEngine(settings)
    most = 0

    async def watched(_: str, answer: Awaitable[Answer]) -> Answer:
        nonlocal most
        most = max(most, len(order.running))
        return await answer

    async with in_process(settings, its_engine, watched) as d:
        order = d.ingress.dispatcher._scheduler
        room = order.room
        await eventually(lambda: room.total_tokens == 1_024 or not kv_room)
        asked = [
            asyncio.create_task(
                d.http.post(
                    "/v1/completions",
                    json={
                        "model": "hermes-tiny",
                        "prompt": f"{number} " + 600 * "x",
                        "max_tokens": 40,
                    },
                )
            )
            for number in range(REQUESTS)
        ]
        await eventually(lambda: d.ingress.dispatcher.in_flight == REQUESTS)
        await eventually(lambda: most == (len(order.running) if kv_room else REQUESTS))
        await its_engine.go()
        answers = await asyncio.gather(*asked)
        assert {one.status_code for one in answers} == {200}
        assert (2 <= most <= 5) == kv_room, "about 200 tokens each"
        await eventually(lambda: not order.running)
        assert room.reserved_tokens == 0
        report = its_engine.report(WORKER)
        assert report is not None
        assert (report.preemptions == 0) == kv_room
        page = (await d.http.get("/metrics")).text
        assert "hermes_kv_engines_tokens" in page
        refused = await d.http.post(
            "/v1/completions", json={"model": "hermes-tiny", "prompt": "x", "max_tokens": 601}
        )
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
