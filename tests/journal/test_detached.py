"""A request of `Prefer: respond-async` goes on without a client, and its answer waits for one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest

from serve_app import timings
from tests.journal.in_process import Door, door, in_process, settings_of
from tests.journal.journal_helpers import World
from tests.waiting import eventually

ASYNC = {"prefer": "respond-async"}
LATER: dict[str, Any] = {"ingress": {"disconnect_grace_s": 0.01}}


async def post(at: Door, stream: Any = False, **headers: str) -> httpx.Response:
    messages = [{"role": "user", "content": "a lighthouse"}]
    body = {"model": "hermes-tiny", "messages": messages, "stream": stream, "max_tokens": 5}
    return await at.http.post("/v1/chat/completions", json=body, headers={**ASYNC, **headers})


async def described(at: Door, request_id: str) -> dict[str, Any]:
    found: dict[str, Any] = (await at.http.get(f"/v1/requests/{request_id}")).json()
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_its_answer_is_the_one_that_the_post_would_have_got(
    redis_url: str, namespace: str, stream: bool
) -> None:
    async with in_process(settings_of(redis_url, namespace)) as at:
        waited = await post(at, stream, prefer="")
        accepted = await post(at, stream)
        request_id = accepted.headers["x-request-id"]
        where = f"/v1/requests/{request_id}"
        assert (accepted.status_code, accepted.json()["state"]) == (202, "queued")
        assert accepted.headers["location"] == where
        assert accepted.headers["preference-applied"] == "respond-async"
        answer = await at.http.get(f"{where}/response")
        again = await at.http.get(f"{where}/response")
        assert answer.status_code == 200
        assert answer.content == again.content
        assert answer.headers["content-type"] == waited.headers["content-type"]
        own = waited.headers["x-request-id"].encode()
        assert _timeless(answer.content, request_id.encode()) == _timeless(waited.content, own)
        assert (await described(at, request_id))["state"] == "completed"


def _timeless(content: bytes, request_id: bytes) -> bytes:
    assert request_id in content
    before, _, after = content.partition(b'"created":')
    return (before + after.lstrip(b"0123456789")).replace(request_id, b"")[:200]


async def test_whoever_reads_it_and_leaves_does_not_cancel_it(
    redis_url: str, namespace: str
) -> None:
    async with door(redis_url, namespace, **LATER) as at:
        request_id = (await post(at)).headers["x-request-id"]
        await at.ingress.exchanges.stop()  # as if another ingress had accepted it
        reading = asyncio.create_task(at.http.get(f"/v1/requests/{request_id}/response"))
        await eventually(lambda: at.ingress.followers.request_ids)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await eventually(lambda: not at.ingress.followers.request_ids)
        await eventually(lambda: not at.ingress._disconnects.tasks)
        assert (await described(at, request_id))["state"] == "queued"


async def test_it_counts_as_waiting_until_it_has_begun_or_ended(
    redis_url: str, namespace: str
) -> None:
    async with door(redis_url, namespace) as at:
        ids = [(await post(at)).headers["x-request-id"] for _ in range(3)]
        assert len(at.ingress.limits.waiting) == 3
        for request_id in ids:
            assert (await at.http.delete(f"/v1/requests/{request_id}")).json()[
                "state"
            ] == "cancelled"
        await eventually(lambda: len(at.ingress.limits.waiting) == 0)
        assert at.ingress.followers.request_ids == []
        gone = await at.http.get(f"/v1/requests/{ids[0]}/response")
        assert (gone.status_code, gone.json()["error"]["code"]) == (499, "cancelled")


async def test_its_key_finds_it_again_but_not_a_request_that_ends_with_its_client(
    redis_url: str, namespace: str
) -> None:
    async with door(redis_url, namespace) as at:
        first, second = [await post(at, **{"idempotency-key": "later"}) for _ in range(2)]
        assert first.headers["x-request-id"] == second.headers["x-request-id"]
        waiting = at.posted("a lighthouse", **{"idempotency-key": "now"})
        await at.waiting(2)
        messages = [{"role": "user", "content": "a lighthouse"}]
        body = {"model": "hermes-tiny", "messages": messages, "stream": True}
        headers = {**ASYNC, "idempotency-key": "now"}
        refused = await at.http.post("/v1/chat/completions", json=body, headers=headers)
        assert (refused.status_code, refused.json()["error"]["param"]) == (422, "prefer")
        assert not waiting.done()


DAY_S = 86_400
KEPT_S = {"": DAY_S, "3600": 3_600, "1e9": 7 * DAY_S}
"""`x-hermes-retention-seconds`, and how long the answer is kept."""


async def test_its_answer_is_kept_as_long_as_it_asks_for(
    w: World, redis_url: str, namespace: str
) -> None:
    async with in_process(settings_of(redis_url, namespace)) as at:
        for asked, kept_s in KEPT_S.items():
            name = "x-hermes-retention-seconds"
            accepted = await post(at, **({name: asked} if asked else {}))
            request_id = accepted.headers["x-request-id"]
            await at.http.get(f"/v1/requests/{request_id}/response")
            key = w.store.key(request_id)
            await eventually(partial(_kept_for, w, key, kept_s))
        for asked in ("0", "-1", "soon", "nan", "inf"):
            refused = await post(at, **{"x-hermes-retention-seconds": asked})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


async def _kept_for(w: World, key: str, kept_s: int) -> bool:
    """Until it has ended, its deadline is added."""
    return bool(kept_s - 60 < await w.redis.pttl(key) / 1000 <= kept_s)


async def test_it_has_a_deadline_of_a_day_unless_it_asks_for_less(
    w: World, redis_url: str, namespace: str
) -> None:
    async with door(redis_url, namespace) as at:
        for asked, limit_s in (("", DAY_S), ("7200", 7_200), ("1e9", DAY_S)):
            accepted = await post(at, **({"x-request-timeout-seconds": asked} if asked else {}))
            found = accepted.json()
            assert found["deadline_at_ms"] - found["admitted_at_ms"] == limit_s * 1000
            kept_s = await w.redis.pttl(w.store.key(found["id"])) / 1000
            assert kept_s > limit_s + DAY_S - 60, "a late ending finds it, too"


async def test_answers_that_nobody_fetches_occupy_a_share_of_redis_at_most(
    w: World,
    redis_url: str,
    namespace: str,
    later: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timings, "KEPT_LOOK_S", 0.0)
    sections = {
        "journal": {"max_retained_share": 1e-7},  # less than any answer
        "telemetry": {"page_period_s": 0},
    }
    async with in_process(settings_of(redis_url, namespace, **sections)) as at:
        first = await post(at, **{"x-hermes-retention-seconds": "3600"})
        await at.http.get(f"/v1/requests/{first.headers['x-request-id']}/response")
        await eventually(partial(_is_counted, w))
        kept_bytes, bound_bytes = await eventually(partial(_gauges, at))
        assert kept_bytes == (await w.store.kept("default")).in_all
        assert bound_bytes == int(at.ingress.limits.memory.room_bytes * 1e-7) > 0
        refused = await post(at)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "results_full")
        assert (await post(at, prefer="")).status_code == 200, "whoever waits is served"
        chat = {"model": "hermes-tiny", "messages": [{"role": "user", "content": "Hi"}]}
        stored = await at.http.post("/v1/chat/completions", json={**chat, "store": True})
        assert (stored.status_code, stored.json()["error"]["code"]) == (429, "results_full")
        later(2 * 3600.0)
        assert await _gauges(at) == (0, bound_bytes), "it has expired"
        assert (await post(at)).status_code == 202
        page = (await at.http.get("/metrics")).text
        refusals = re.findall(
            r'^hermes_requests_refused_total{reason="results_full",.*} (.*)$', page, re.MULTILINE
        )
        assert sum(map(float, refusals)) == 2


async def _gauges(at: Door) -> tuple[float, ...]:
    page = (await at.http.get("/metrics")).text
    found = re.findall(r"^hermes_retained_answers_(?:limit_)?bytes (.*)$", page, re.MULTILINE)
    return tuple(map(float, found))


async def _is_counted(w: World) -> bool:
    kept = await w.store.kept("default")
    return kept.of_tenant == kept.in_all > 0


async def test_of_an_answer_that_was_given_up_only_the_ending_is_kept(
    w: World, redis_url: str, namespace: str
) -> None:
    async with door(redis_url, namespace) as at:
        request_id = (await post(at)).headers["x-request-id"]
        await at.http.delete(f"/v1/requests/{request_id}")
        assert await w.redis.xlen(w.store.key(request_id)) == 1
        found = await described(at, request_id)
        assert (found["state"], found["reason"], found["class"]) == (
            "cancelled",
            "cancelled",
            "standard",
        )
