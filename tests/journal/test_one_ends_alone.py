"""A request that blocks its worker's event loop, or whose answer is too large, ends with its own
reason, and the worker's other requests continue. A part of an answer is not taken for all of it.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import httpx
import pytest

from serve_app.contract import Reason, State
from serve_app.journal.attempt_log import AttemptLog
from serve_app.journal.entries import Head, RequestFacts, Summary, decode_facts
from tests.journal.in_process import door, in_process, settings_of
from tests.journal.journal_helpers import OPENED, World
from tests.waiting import eventually


async def among_others(
    redis_url: str, namespace: str, one: dict[str, Any], args: dict[str, Any]
) -> httpx.Response:
    """The answer to `one`, sent between two requests that are answered whole."""
    settings = settings_of(
        redis_url,
        namespace,
        engine={"kind": "simulated", "args": args},
        journal={"max_answer_bytes": 65_536},
    )
    async with in_process(settings) as d:
        first, refused, last = await asyncio.gather(
            *(
                d.http.post("/v1/completions", json={"model": "hermes-tiny", **body})
                for body in (OTHER, one, OTHER)
            )
        )
    for answer in (first, last):
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 100
    return refused


OTHER = {"prompt": "a story", "max_tokens": 100}


async def test_only_the_request_that_blocks_the_loop_is_ended(
    redis_url: str, namespace: str
) -> None:
    args = {"tokens_per_s": 50, "faults": {"hold it": "hold"}}
    refused = await among_others(redis_url, namespace, {"prompt": "hold it"}, args)
    assert (refused.status_code, refused.json()["error"]["code"]) == (
        400,
        Reason.EVENT_LOOP_BLOCKED,
    )


@pytest.mark.parametrize("streamed", [False, True])
async def test_only_the_request_whose_answer_is_too_large_is_ended(
    redis_url: str, namespace: str, streamed: bool
) -> None:
    one = {"prompt": "a", "max_tokens": 3_000, "stream": streamed}
    refused = await among_others(redis_url, namespace, one, {"tokens_per_s": 2_000})
    assert refused.status_code == (200 if streamed else 400)
    assert f'"code":"{Reason.ANSWER_TOO_LARGE}"' in refused.text
    assert len(refused.content) < 67_000


async def test_a_worker_keeps_nothing_of_what_was_cancelled(redis_url: str, namespace: str) -> None:
    """A cycle would keep its body until Python's garbage collector comes. The first request may be
    kept by the connection that was opened for it.
    """
    async with in_process(settings_of(redis_url, namespace)) as d:
        gc.disable()
        try:
            for _ in range(2):
                asked = {
                    "model": "hermes-tiny",
                    "prompt": "a",
                    "stream": True,
                    "max_tokens": 10_000,
                }
                async with d.http.stream("POST", "/v1/completions", json=asked) as response:
                    name = response.headers["x-request-id"]
                    assert (await d.http.delete(f"/v1/requests/{name}")).status_code == 200
                await eventually(lambda: not d.ingress.dispatcher.in_flight)
            await eventually(lambda: name not in _attempts())
        finally:
            gc.enable()


def _attempts() -> list[str]:
    """The requests of which a worker's state is in memory."""
    return [one.request_id for one in gc.get_objects() if isinstance(one, AttemptLog)]


@pytest.mark.parametrize("reason", [Reason.CANCELLED, Reason.EVENT_LOOP_BLOCKED])
async def test_a_part_of_a_whole_answer_is_no_answer(
    w: World, redis_url: str, namespace: str, reason: Reason
) -> None:
    """A large one has several entries; here its request ends behind the first, from outside or by
    its worker.
    """
    async with door(redis_url, namespace) as d:
        body = {"model": "hermes-tiny", "prompt": "Hi"}
        asked = asyncio.create_task(d.http.post("/v1/completions", json=body))
        (request_id,) = await d.waiting(1)
        await eventually(lambda: w.journals())
        attempt, entries = await (await w.writer()).open(request_id, 1, b"nonce", OPENED)
        head = Head(200, [("content-type", "application/json")])
        attempt.append([], [b'{"choices": ['], 0, head)
        await eventually(lambda: not attempt.pending)
        if reason is Reason.CANCELLED:
            await d.http.delete(f"/v1/requests/{request_id}")
        else:
            facts = decode_facts(entries[0], RequestFacts)
            summary = Summary(facts, OPENED, 1, facts.admitted_ms)
            attempt.stop(State.FAILED, reason, summary, None)
            await attempt.closed
        again = await d.http.get(f"/v1/requests/{request_id}/response")
        for answer in (await asked, again):
            assert answer.status_code >= 400, answer.text
            assert answer.json()["error"]["code"] == reason
