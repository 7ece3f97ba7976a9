"""A request whose computing holds its worker's loop ends by a reason of its own; the others of that worker go on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from serve_app.errors import Reason
from tests.journal.any_json import MODEL, Door

JSON = [(b"content-type", b"application/json")]


def body(prompt: str) -> bytes:
    return json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 100}).encode()


def test_a_request_that_holds_the_loop_is_ended_and_nobody_else(redis_url: str, namespace: str) -> None:
    door = Door(redis_url, namespace, tokens_per_s=50, max_output_tokens=0, faults={"hold it": "hold"})

    async def both() -> list[Any]:
        asked = [door.ask("/v1/completions", JSON, body(prompt)) for prompt in ("a story", "hold it", "another")]
        return list(await asyncio.gather(*asked))

    try:
        (first, whole), (refused, error), (last, _) = door.run(both())
    finally:
        door.run(door.stop())
    assert (first, refused, last) == (200, 400, 200)
    assert json.loads(whole)["usage"]["completion_tokens"] == 100
    assert json.loads(error)["error"]["code"] == Reason.LOOP_HELD
