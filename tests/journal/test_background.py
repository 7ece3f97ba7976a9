"""Responses in the background: their states before a worker has begun them, and their end by force.
What becomes of one on a real engine: tests/service/test_openai_sdk.py.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import httpx
import msgspec
import pytest

from serve_app.contract import Reason, State
from serve_app.journal.entries import Head, RequestFacts, Summary, decode_facts
from tests.journal.in_process import Door, door, in_process, settings_of
from tests.journal.journal_helpers import OPENED, World
from tests.tables import Failures
from tests.waiting import eventually

BODY: dict[str, Any] = {"model": "hermes-tiny", "input": "a lighthouse", "background": True}


async def created(at: Door, **fields: Any) -> dict[str, Any]:
    answer = await at.http.post("/v1/responses", json={**BODY, **fields})
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    assert found["id"] == f"resp_{answer.headers['x-request-id']}"
    return found


async def test_a_response_is_queued_fetched_cancelled_and_deleted(
    redis_url: str, namespace: str
) -> None:
    async with door(redis_url, namespace) as at:
        found = await created(at)
        where = f"/v1/responses/{found['id']}"
        assert (found["object"], found["status"], found["background"]) == (
            "response",
            "queued",
            True,
        )
        assert (await at.http.get(where)).json() == found
        for _ in range(2):  # the second changes nothing
            ended = (await at.http.post(f"{where}/cancel")).json()
            assert (ended["status"], ended["error"]) == ("cancelled", None)
        assert (await at.http.get(where)).json() == ended
        deleted = (await at.http.delete(where)).json()
        assert deleted == {"id": found["id"], "object": "response", "deleted": True}
        gone = await at.http.get(where)
        assert (gone.status_code, gone.json()["error"]["param"]) == (404, "id")


ASKED: dict[str, Any] = {
    "instructions": "Be brief.",
    "max_output_tokens": 7,
    "max_tool_calls": 2,
    "metadata": {"job": "7", "in": "{\u2028}"},
    "parallel_tool_calls": False,
    "presence_penalty": 0.5,
    "prompt_cache_key": "a key",
    "reasoning": {"effort": "low"},
    "safety_identifier": "somebody",
    "service_tier": "flex",
    "temperature": 0,
    "text": {"format": {"type": "json_object"}, "verbosity": "low"},
    "tool_choice": {"type": "function", "name": "f"},
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "top_logprobs": 3,
    "top_p": 0.9,
    "truncation": "auto",
    "user": "a user",
}
OF_VLLM: dict[str, Any] = {
    "object": "response",
    "output": [],
    "status": "completed",
    "temperature": 0.6,
    "metadata": None,
    "max_output_tokens": 4040,
    "tool_choice": "none",
}
"""A part of what vLLM answers to a request that says nothing of these fields."""
LEFT_OUT: dict[str, Any] = {
    "metadata": {},
    "max_output_tokens": None,
    "tool_choice": "auto",
    "tools": [],
    "text": {"format": {"type": "text"}},
    "truncation": "disabled",
}


async def test_a_response_repeats_what_it_was_asked_in_every_state(
    w: World, redis_url: str, namespace: str
) -> None:
    async def cancel(at: Door, request_id: str) -> None:
        await at.http.post(f"/v1/responses/resp_{request_id}/cancel")

    async def run(at: Door, request_id: str) -> None:
        await (await w.writer()).open(request_id, 1, b"nonce", OPENED)

    async def fail(at: Door, request_id: str) -> None:
        await w.endings.end(request_id, Reason.POISON)

    async def complete(at: Door, request_id: str) -> None:
        attempt, entries = await (await w.writer()).open(request_id, 1, b"nonce", OPENED)
        head = Head(200, [("content-type", "application/json")])
        attempt.append([], [msgspec.json.encode(OF_VLLM)], 0, head)
        summary = Summary(decode_facts(entries[0], RequestFacts), OPENED, 1, 1)
        attempt.stop(State.COMPLETED, None, summary, 1)
        await attempt.closed

    async def wait(at: Door, request_id: str) -> None:
        pass

    steps = {
        "queued": wait,
        "in_progress": run,
        "cancelled": cancel,
        "failed": fail,
        "completed": complete,
    }
    async with door(redis_url, namespace) as at:
        with Failures() as failures:
            for status, step in steps.items():
                for asked, repeated in ((ASKED, ASKED), ({}, LEFT_OUT)):
                    with failures.of(status, asked):
                        first = await created(at, **asked)
                        await step(at, first["id"].removeprefix("resp_"))
                        found = (await at.http.get(f"/v1/responses/{first['id']}")).json()
                        assert found["status"] == status
                        assert (found["background"], found["store"]) == (True, True)
                        for one in (first, found):
                            assert {name: one[name] for name in repeated} == repeated
                        own = asked.get("temperature", 0.6 if status == "completed" else 1)
                        assert found["temperature"] == own
            with failures.of("another endpoint's"):
                chat = await at.detached("Hi")
                assert (await at.http.get(f"/v1/responses/resp_{chat}")).status_code == 404


async def test_a_stream_in_the_background_goes_on_when_its_client_leaves(
    redis_url: str, namespace: str
) -> None:
    async with door(redis_url, namespace, ingress={"disconnect_grace_s": 0.01}) as at:
        body = {**BODY, "stream": True}
        with suppress(httpx.ReadTimeout):
            await at.http.post("/v1/responses", json=body, timeout=0.3)
        await eventually(lambda: not at.ingress.followers.request_ids)
        await eventually(lambda: not at.ingress._disconnects.tasks)
        (one,) = (await at.http.get("/v1/requests")).json()["data"]
        assert one["state"] == "queued"


REFUSED: dict[str, tuple[str, str, int, str]] = {
    "not streamed": ("GET", "{}?stream=true", 400, "stream"),
    "before the first": ("GET", "{}?stream=true&starting_after=-1", 400, "starting_after"),
    "unknown": ("GET", "{}0", 404, "id"),
    "cancel unknown": ("POST", "{}0/cancel", 404, "id"),
    "delete unknown": ("DELETE", "{}0", 404, "id"),
}


async def test_what_is_not_there_or_has_no_events_is_refused(
    redis_url: str, namespace: str
) -> None:
    async with door(redis_url, namespace) as at:
        found = await created(at)
        with Failures() as failures:
            for name, (method, path, status, param) in REFUSED.items():
                with failures.of(name):
                    url = "/v1/responses/" + path.format(found["id"])
                    answer = await at.http.request(method, url)
                    error = answer.json()["error"]
                    assert (answer.status_code, error["param"]) == (status, param)
        unstored = await at.http.post("/v1/responses", json={**BODY, "store": False})
        assert (unstored.status_code, unstored.json()["error"]["param"]) == (400, "background")


async def test_what_is_cancelled_counts_until_it_is_deleted_once_and_then_occupies_nothing(
    w: World, redis_url: str, namespace: str
) -> None:
    async with door(redis_url, namespace) as at:
        ids = [(await created(at))["id"] for _ in range(3)]
        counted = []
        for response_id in ids:
            await at.http.post(f"/v1/responses/{response_id}/cancel")
            counted.append(await w.store.kept("default"))
        assert counted == sorted(counted)
        assert counted[0].of_tenant == counted[0].in_all > 0, "it is kept for a day, too"
        for response_id in ids:
            many = [at.http.delete(f"/v1/responses/{response_id}") for _ in range(4)]
            await asyncio.gather(*many)
        await at.http.delete(f"/v1/responses/{(await created(at))['id']}")  # one that waits
        assert await w.store.kept("default") == (0, 0)
        assert not [key async for key in w.operator.scan_iter(f"{namespace}:[jb]:*")]
        await eventually(lambda: len(at.ingress.limits.waiting) == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_of_another_endpoint_is_no_response(
    redis_url: str, namespace: str, stream: bool
) -> None:
    async with in_process(settings_of(redis_url, namespace)) as at:
        body = {"model": "hermes-tiny", "prompt": "a", "max_tokens": 2, "stream": stream}
        answer = await at.http.post("/v1/completions", json=body)
        request_id = answer.headers["x-request-id"]
        for response_id in (request_id, f"resp_{request_id}"):
            found = await at.http.get(f"/v1/responses/{response_id}")
            assert (found.status_code, found.json()["error"]["param"]) == (404, "id")


async def test_what_is_kept_of_an_answer_that_is_no_transcript_is_counted_until_it_is_deleted(
    w: World,
) -> None:
    """Such as a large one, of which all entries remain."""
    facts = RequestFacts("batch", "t", "s", "hermes-tiny", False, 1, 60_000, w.channel)
    facts = msgspec.structs.replace(facts, detached=True, retention_s=3_600.0)
    await w.accept("req_1", facts)
    attempt = await w.opened(await w.writer())
    attempt.append([], [b"x" * 100_000], 0, Head(200, [("content-type", "application/json")]))
    now_ms = w.store.clock.now_ms()
    attempt.stop(State.COMPLETED, None, Summary(facts, OPENED, 1, now_ms))
    await attempt.closed
    assert (await w.store.kept("t")).of_tenant > 100_000
    await w.store.forget("req_1")
    assert await w.store.kept("t") == (0, 0)
