"""A POST with the `Idempotency-Key` of an earlier one joins that request, running or finished."""

from __future__ import annotations

import uuid
from functools import partial

import httpx
import openai
import pytest

from tests.service.disturbance import simulated_text
from tests.service.support import Running, events_of, together


def key() -> dict[str, str]:
    return {"idempotency-key": f"test-{uuid.uuid4().hex}"}


def test_fifty_at_once_over_two_ingresses_make_one_generation(simulated: Running) -> None:
    simulated.until_idle()
    before = simulated.settled()
    urls = list(simulated.ingress_urls.values())
    assert len(urls) == 2
    body, headers = simulated.body("Only once.", 60, stream=True), key()

    def post(n: int) -> httpx.Response:
        return simulated.http.post(f"{urls[n % 2]}/v1/chat/completions", json=body, headers=headers)

    answers = together([partial(post, n) for n in range(50)], 50)
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.headers["x-request-id"] for answer in answers}) == 1
    assert len({answer.text for answer in answers}) == 1
    simulated.until_idle()
    after = simulated.settled()
    assert (
        after.total("hermes_requests_admitted_total")
        - before.total("hermes_requests_admitted_total")
        == 1
    )
    output = {"kind": "output"}
    assert (
        after.total("hermes_tokens_total", **output) - before.total("hermes_tokens_total", **output)
        == 60
    )


@pytest.mark.nightly  # in the gate: journal/test_idempotency_keys.py
def test_a_finished_request_is_answered_again_without_computing(simulated: Running) -> None:
    headers = key()
    first = simulated.ask("Once and for all.", 12, headers=headers)
    again = simulated.ask("Once and for all.", 12, headers=headers)
    assert again.headers["x-request-id"] == first.headers["x-request-id"]
    assert again.json() == first.json()


def test_a_running_stream_is_joined_from_its_beginning(simulated: Running) -> None:
    headers = key()
    with simulated.stream("Join me.", 120, headers=headers) as response:
        blocks = response.iter_text()
        next(blocks)
        with simulated.stream("Join me.", 120, headers=headers) as joined:
            found = events_of("".join(joined.iter_text()))
    assert [event.id for event in found] == list(range(1, len(found) + 1))
    assert found[-1].data == "[DONE]"


@pytest.mark.nightly  # in the gate: journal/test_idempotency_keys.py
@pytest.mark.parametrize("change", [{"tokens": 13}, {"prompt": "Another."}, {"stream": True}])
def test_another_request_under_the_same_key_is_a_conflict(
    simulated: Running, change: dict[str, object]
) -> None:
    headers = key()
    simulated.ask("The first.", 12, headers=headers)
    body = simulated.body(**{"prompt": "The first.", "tokens": 12, **change})  # type: ignore[arg-type]
    answer = simulated.http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 422
    assert answer.headers["x-hermes-reason"] == "idempotency_conflict"
    assert answer.json()["error"]["param"] == "idempotency-key"


def test_the_sdk_raises_its_proper_exception_for_a_conflict(simulated: Running) -> None:
    headers = key()
    ask = simulated.sdk.chat.completions.create
    ask(
        model=simulated.model,
        messages=[{"role": "user", "content": "a"}],
        max_tokens=2,
        extra_headers=headers,
    )
    with pytest.raises(openai.UnprocessableEntityError):
        ask(
            model=simulated.model,
            messages=[{"role": "user", "content": "b"}],
            max_tokens=2,
            extra_headers=headers,
        )


@pytest.mark.nightly  # in the gate: journal/test_idempotency_keys.py
def test_requests_without_a_key_are_each_computed(simulated: Running) -> None:
    first, second = (simulated.ask("Twice.", 4) for _ in range(2))
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert first.json()["choices"][0]["message"]["content"] == simulated_text("Twice.", 4)
