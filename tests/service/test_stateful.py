"""A conversation by `previous_response_id`, a process killed before each turn: the text of one that
nothing has disturbed.
"""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import pytest

from scripts.chaos_testing.parts import Parts
from serve_app.client import ReconnectingTransport
from tests.service.disturbance import on_disk, whole_again
from tests.service.support import Running, openai_client

pytestmark = [pytest.mark.disturbs, pytest.mark.nightly, pytest.mark.timeout(3600)]
TURNS = 20
KINDS = ("worker", "ingress", "redis", "engine")


def conversation(sdk: Any, model: str, before: Any) -> list[str]:
    """The answers to twenty questions. `before`: called before each."""
    texts, last = [], None
    for turn in range(TURNS):
        before(turn)
        last = sdk.responses.create(
            model=model,
            input=f"Question {turn}: what is behind the lighthouse?",
            temperature=0,
            max_output_tokens=12,
            previous_response_id=last.id if last else None,
        )
        texts.append(last.output_text)
    return texts


def test_twenty_turns_have_the_text_of_an_undisturbed_conversation(service: Running) -> None:
    whole_again(service, 2)
    parts, kinds = Parts(service.service), itertools.cycle(KINDS)

    def kill(turn: int) -> None:
        kind = next(kinds)
        if kind == "redis":
            on_disk(service)
        parts.kill(parts.pids(kind)[-1])
        if kind in ("worker", "engine"):
            whole_again(service, 1)

    with httpx.Client(transport=ReconnectingTransport(), timeout=300) as http:
        sdk = openai_client(service.url, "", http).with_options(max_retries=20)
        undisturbed = conversation(sdk, service.model, lambda turn: None)
        assert conversation(sdk, service.model, kill) == undisturbed
