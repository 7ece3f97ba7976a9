"""What outlives every process: a conversation by `previous_response_id`, and responses in the
background whose clients have left.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from functools import partial
from typing import Any

import httpx
import pytest

from scripts.chaos_testing.parts import FAULTS, Parts
from serve_app.client import ReconnectingTransport
from tests.service.disturbance import on_disk, whole_again
from tests.service.support import Running, openai_client, together
from tests.waiting import until

pytestmark = [pytest.mark.disturbs, pytest.mark.nightly, pytest.mark.timeout(3600)]
TURNS = 20
KINDS = ("worker", "ingress", "redis", "engine")


def kill_one(parts: Parts, kind: str) -> None:
    """Kill a process of this kind, once there is one: the last may have gone with its parent."""
    pid = until(f"there is a {kind}", lambda: parts.pids(kind))[-1]

    async def strike() -> None:
        await FAULTS[kind].strike(parts, pid)

    asyncio.run(strike())


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
        kill_one(parts, kind)
        if kind in ("worker", "engine"):
            whole_again(service, 1)

    with httpx.Client(transport=ReconnectingTransport(), timeout=300) as http:
        sdk = openai_client(service.url, "none", http).with_options(max_retries=20)
        undisturbed = conversation(sdk, service.model, lambda turn: None)
        assert conversation(sdk, service.model, kill) == undisturbed


CLIENTS, PROMPTS, TOKENS = 1_000, 20, 12
AFTER = 4
"""Events that a client has when it comes back."""


def body_of(number: int, **fields: Any) -> dict[str, Any]:
    text = f"Tell me story {number % PROMPTS} of the lighthouse."
    return {"input": text, "temperature": 0, "max_output_tokens": TOKENS, **fields}


def begun(service: Running, number: int) -> str:
    """Send a response in the background, and leave at its first event; returns its id."""
    body = body_of(number, background=True, stream=True)
    headers = {"idempotency-key": f"stateful-{number}"}
    while True:
        try:
            with (
                httpx.Client(base_url=service.url, timeout=300) as http,
                http.stream("POST", "/v1/responses", json=body, headers=headers) as answer,
            ):
                if answer.status_code == 200 and any(answer.iter_bytes()):
                    return f"resp_{answer.headers['x-request-id']}"
                assert answer.status_code in (502, 503, 504, 429), answer.read()
        except httpx.TransportError:
            pass
        time.sleep(0.5)  # what was killed comes back


def ended(service: Running, response_id: str) -> Any:
    """The response, once it has ended."""

    def look() -> Any:
        try:
            answer = service.http.get(f"/v1/responses/{response_id}", timeout=300)
        except httpx.TransportError:
            return None
        found = answer.json() if answer.status_code == 200 else {"status": "queued"}
        return None if found["status"] in ("queued", "in_progress") else found

    return until(f"{response_id} has ended", look, 600)


def test_a_thousand_responses_whose_clients_have_left_are_all_there(service: Running) -> None:
    whole_again(service, 2)
    texts = [
        service.sdk.responses.create(model=service.model, **body_of(number)).output_text
        for number in range(PROMPTS)
    ]
    parts, left = Parts(service.service), [*KINDS, "haproxy", "controller"]
    found: list[str] = []

    def one(number: int) -> None:
        found.append(begun(service, number))
        if len(found) % 150 == 0 and left:
            if (kind := left.pop()) == "redis":
                on_disk(service)
            kill_one(parts, kind)

    together([partial(one, number) for number in range(CLIENTS)])
    assert len(set(found)) == CLIENTS
    assert not left
    whole_again(service, 2)
    for response_id in found:
        response = ended(service, response_id)
        assert response["status"] in ("completed", "incomplete"), response
        number = int(next(item for item in asked_of(service, response_id)).split()[3])
        assert response["output"][0]["content"][0]["text"] == texts[number]
    for response_id in found[::40]:
        tails = []
        for url in service.ingress_urls.values():
            page = f"{url}/v1/responses/{response_id}"
            every, tail = (
                httpx.get(page, params={"stream": True, **more}, timeout=300).content
                for more in ({}, {"starting_after": AFTER})
            )
            assert every.endswith(tail)
            assert tail.startswith(b"id: %d\n" % (AFTER + 2))
            tails.append(every)
        assert len(set(tails)) == 1


def asked_of(service: Running, response_id: str) -> list[str]:
    """The texts that a response was asked."""
    page = service.http.get(f"/v1/responses/{response_id}/input_items").json()
    return [item["content"][0]["text"] for item in page["data"]]
