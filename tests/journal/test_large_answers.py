"""An answer that is too large ends with its own reason, whatever makes it large, and harms no other
request.
"""

from __future__ import annotations

import asyncio

import pytest

from serve_app.contract import Reason
from tests.journal.in_process import in_process, settings_of


@pytest.mark.parametrize("streamed", [False, True])
async def test_only_the_request_whose_answer_is_too_large_is_ended(
    redis_url: str, namespace: str, streamed: bool
) -> None:
    args = {"tokens_per_s": 2_000, "max_output_tokens": 0}
    settings = settings_of(
        redis_url,
        namespace,
        engine={"kind": "simulated", "args": args},
        journal={"max_answer_bytes": 65_536},
    )
    async with in_process(settings) as d:
        bodies = [
            {"model": "hermes-tiny", "prompt": "a", "max_tokens": tokens, "stream": stream}
            for tokens, stream in ((100, False), (3_000, streamed), (100, False))
        ]
        first, refused, last = await asyncio.gather(
            *(d.http.post("/v1/completions", json=body) for body in bodies)
        )
    assert [answer.status_code for answer in (first, last)] == [200, 200]
    assert refused.status_code == (200 if streamed else 400)
    assert f'"code":"{Reason.ANSWER_TOO_LARGE}"' in refused.text
    assert len(refused.content) < 67_000
