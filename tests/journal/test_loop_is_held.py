"""A request that blocks its worker's event loop ends with its own reason, and the worker's other
requests continue.
"""

from __future__ import annotations

import asyncio

from serve_app.contract import Reason
from tests.journal.in_process import in_process, settings_of


async def test_only_the_request_that_blocks_the_loop_is_ended(
    redis_url: str, namespace: str
) -> None:
    args = {"tokens_per_s": 50, "max_output_tokens": 0, "faults": {"hold it": "hold"}}
    settings = settings_of(redis_url, namespace, engine={"kind": "simulated", "args": args})
    async with in_process(settings) as d:
        bodies = [
            {"model": "hermes-tiny", "prompt": prompt, "max_tokens": 100}
            for prompt in ("a story", "hold it", "another")
        ]
        first, refused, last = await asyncio.gather(
            *(d.http.post("/v1/completions", json=body) for body in bodies)
        )
    assert [answer.status_code for answer in (first, refused, last)] == [200, 400, 200]
    assert first.json()["usage"]["completion_tokens"] == 100
    assert refused.json()["error"]["code"] == Reason.LOOP_HELD
