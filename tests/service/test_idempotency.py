"""A POST with the `Idempotency-Key` of an earlier one joins that request, running or finished."""

from __future__ import annotations

import uuid
from functools import partial

import httpx
import openai
import pytest

from tests.service.support import CHAT, Running, asking, check_whole, events_of, together


def key() -> dict[str, str]:
    return {"idempotency-key": f"test-{uuid.uuid4().hex}"}


def test_fifty_at_once_over_two_ingresses_make_one_generation(simulated: Running) -> None:
    simulated.until_idle()
    before = simulated.settled()
    urls = list(simulated.ingress_urls.values())
    assert len(urls) == 2
    body, headers = simulated.body("Only once.", 60, stream=True), key()

    def post(n: int) -> httpx.Response:
        return simulated.http.post(f"{urls[n % 2]}{CHAT}", json=body, headers=headers)

    answers = together([partial(post, n) for n in range(50)], 50)
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.headers["x-request-id"] for answer in answers}) == 1
    assert len({answer.text for answer in answers}) == 1
    simulated.until_idle()
    after = simulated.settled()
    for name, labels, more in (
        ("hermes_requests_admitted_total", {}, 1),
        ("hermes_tokens_total", {"kind": "output"}, 60),
    ):
        assert after.total(name, **labels) - before.total(name, **labels) == more


def test_a_running_stream_is_joined_from_its_beginning(simulated: Running) -> None:
    headers = key()
    with simulated.stream("Join me.", 120, headers=headers) as response:
        blocks = response.iter_text()
        next(blocks)
        with simulated.stream("Join me.", 120, headers=headers) as joined:
            found = events_of("".join(joined.iter_text()))
    check_whole(found)


def test_the_sdk_raises_its_proper_exception_for_a_conflict(simulated: Running) -> None:
    headers = key()
    ask = simulated.sdk.chat.completions.create
    ask(**asking("a"), extra_headers=headers)
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        ask(**asking("b"), extra_headers=headers)
    assert refused.value.response.headers["x-hermes-reason"] == "idempotency_conflict"
    assert refused.value.param == "idempotency-key"
