"""No tenant's cache salt equals another's, whatever a client sends, and every path into the engine
sets one.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.entrypoints.generate.base.protocol import validate_cache_salt

from serve_app.settings import DEFAULT_TENANT
from workers import attempt as recording
from workers.engine import Progress
from workers.resumable import RecordingClient, _salted

TENANTS = [DEFAULT_TENANT, "acme", "acm", "acme:", "7", ""]
OWN = [None, "x", "e:x", ":", "acme:x", "4:acme:x", "7:default:x", "é😀", "x" * 128]


def salt(tenant: str, own: str | None) -> str | None:
    prompt = {"type": "token", "prompt_token_ids": [1]}
    found = _salted(prompt if own is None else {**prompt, "cache_salt": own}, tenant)
    assert found["prompt_token_ids"] == [1]
    result: str | None = found.get("cache_salt")
    return result


def test_no_two_tenants_or_salts_share_a_prefix() -> None:
    salts = [salt(tenant, own) for tenant, own in itertools.product(TENANTS, OWN)]
    assert len(set(salts)) == len(salts)
    assert salt(DEFAULT_TENANT, None) is None
    assert salt("acme", "x") == salt("acme", "x")
    for made in salts:
        validate_cache_salt(made)


def test_nor_can_a_salt_be_made_that_equals_what_another_has() -> None:
    hers = salt("acme", None)
    assert hers is not None
    assert salt("zeta", hers) != hers
    assert salt(DEFAULT_TENANT, hers) != hers


class Listening:
    """Replaces the engine, and records the prompts that it gets."""

    def __init__(self) -> None:
        self.prompts: list[Any] = []

    async def encode(self, prompt: Any, *_: Any, **__: Any) -> Any:
        self.prompts.append(prompt)
        return
        yield


async def test_a_prompt_for_embeddings_has_the_tenants_salt() -> None:
    """Those that an engine answers with text are in test_resume.py."""
    engine: Any = Listening()
    client = RecordingClient(engine, Progress(), rerun_tokens=0)
    attempt: Any = SimpleNamespace(facts=SimpleNamespace(tenant="acme"), next_generation=lambda: 0)
    recording.current.set(attempt)
    async for _ in client.encode({"type": "token", "prompt_token_ids": [1]}, None, "req_1"):
        pass
    assert [prompt["cache_salt"] for prompt in engine.prompts] == [salt("acme", None)]
