"""A request that blocks its worker's event loop ends with its own reason, and the worker's other
requests continue.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from serve_app.contract import Reason
from tests.journal.any_json import MODEL, ServiceInAThread

JSON = [(b"content-type", b"application/json")]


def body(prompt: str) -> bytes:
    return json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 100}).encode()


def test_only_the_request_that_blocks_the_loop_is_ended(redis_url: str, namespace: str) -> None:
    service = ServiceInAThread(
        redis_url, namespace, tokens_per_s=50, max_output_tokens=0, faults={"hold it": "hold"}
    )

    async def both() -> list[Any]:
        asked = [
            service.ask("/v1/completions", JSON, body(prompt))
            for prompt in ("a story", "hold it", "another")
        ]
        return list(await asyncio.gather(*asked))

    try:
        (first, whole), (refused, error), (last, _) = service.run(both())
    finally:
        service.run(service.stop())
    assert (first, refused, last) == (200, 400, 200)
    assert json.loads(whole)["usage"]["completion_tokens"] == 100
    assert json.loads(error)["error"]["code"] == Reason.LOOP_HELD
