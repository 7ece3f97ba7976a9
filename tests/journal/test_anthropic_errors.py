"""What an ingress does not accept raises the errors that Anthropic's unmodified SDK has for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.journal.in_process import Door, door, keys_of

HELLO: Any = {"model": "hermes-tiny", "messages": [{"role": "user", "content": "Hello"}]}
COUNT: Any = {**HELLO, "max_tokens": 32_000}
IDENTIFIED = {"anthropic-version": "2023-06-01"}


def sdk(d: Door, key: str) -> anthropic.AsyncAnthropic:
    """To be closed: else its finalizer closes it in the loop of whichever test runs then."""
    url = f"http://127.0.0.1:{d.port}"
    return anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0, timeout=60)


async def test_what_is_not_accepted_raises_the_sdks_own_errors(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    queue = {"max_waiting_standard": 2, "max_tenant_share": 0.5}
    sections = {"queue": queue, "auth": keys_of(tmp_path, "one", "two")}
    async with door(redis_url, namespace, **sections) as d:
        async with sdk(d, "wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(**COUNT)
        detached = {"prefer": "respond-async"}
        for key in ("one", "two"):
            headers = {"x-api-key": key, **detached, **IDENTIFIED}
            answer = await d.http.post("/v1/messages", json=COUNT, headers=headers)
            assert answer.status_code == 202
            if key == "one":
                async with sdk(d, key) as client:
                    with pytest.raises(anthropic.RateLimitError):
                        await client.messages.create(**COUNT)
