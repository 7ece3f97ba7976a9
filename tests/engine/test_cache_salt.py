"""No tenant's cache salt equals another's, whatever a client sends, and every path into the engine
sets one.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.entrypoints.generate.base.protocol import validate_cache_salt
from vllm.sampling_params import SamplingParams

from serve_app.settings import DEFAULT_TENANT
from workers import recorder as recording
from workers.engine import Progress
from workers.replay import Recorded
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

    async def generate(self, prompt: Any, *_: Any, **__: Any) -> Any:
        self.prompts.append(prompt)
        return
        yield

    encode = generate


class Whose:
    """The part of a recorder that is needed here."""

    tenant = "acme"
    recorded = Recorded()

    def next_generation(self) -> int:
        return 0

    def can_be_continued(self, whether: bool) -> None:
        """Nobody asks here."""


@pytest.mark.parametrize("way", ["generate", "encode"])
async def test_every_way_into_the_engine_has_the_tenants_salt(way: str) -> None:
    engine: Any = Listening()
    client = RecordingClient(engine, Progress(), rerun_tokens=0)
    recording.current.set(Whose())  # type: ignore[arg-type]
    params = SamplingParams()
    params.output_kind = recording_kind()
    async for _ in getattr(client, way)(
        {"type": "token", "prompt_token_ids": [1]}, params, "req_1"
    ):
        pass
    assert [prompt["cache_salt"] for prompt in engine.prompts] == [salt("acme", None)]


def recording_kind() -> Any:
    """Requests deltas; there may be none."""
    from vllm.sampling_params import RequestOutputKind

    return RequestOutputKind.DELTA
