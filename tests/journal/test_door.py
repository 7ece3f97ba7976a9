"""A full Redis, and clients that want more than their share: a real ingress on a real socket, and a
real Redis.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
from pathlib import Path
from typing import Any

import pytest

from serve_app import timings
from serve_app.admission.limits import MemoryLimit
from serve_app.ingress.connection_limits import Upload
from serve_app.policy.classes import CLASSES
from tests.journal.in_process import Door, door, in_process, settings_of
from tests.journal.journal_helpers import OPENED, PrivateRedis, World
from tests.waiting import eventually

MIB = 1 << 20
LIMIT_BYTES = 64 * MIB
LARGE = "x" * (4 * MIB)


async def limit(d: Door, redis: PrivateRedis, limit_bytes: int) -> None:
    redis.run("CONFIG", "SET", "maxmemory", limit_bytes)
    memory = d.ingress.limits.memory
    await eventually(lambda: memory.seen and memory.seen.limit_bytes == limit_bytes)


async def looked_again(memory: MemoryLimit) -> None:
    """Wait for a look at Redis's memory that has begun since."""
    for _ in range(2):
        seen = memory.seen
        await eventually(lambda: memory.seen is not seen)  # noqa: B023


async def test_large_requests_cannot_fill_redis_and_deleting_makes_room(
    private_redis: PrivateRedis, namespace: str
) -> None:
    async with door(private_redis.url, namespace) as d:
        memory, redis = d.ingress.limits.memory, private_redis.client
        await limit(d, private_redis, LIMIT_BYTES)
        large: list[str] = []
        while True:
            asked = d.posted(LARGE, **{"x-hermes-class": CLASSES[1 + len(large) % 3]})
            await eventually(lambda: asked.done() or d.ingress.followers.request_ids != large)  # noqa: B023
            if asked.done():
                break
            large = d.ingress.followers.request_ids
        refused = asked.result()
        assert (refused.status_code, refused.headers["x-hermes-reason"]) == (429, "storage_full")
        assert int(refused.headers["retry-after"]) >= 1

        async def used_bytes() -> int:
            return int((await redis.info("memory"))["used_memory"])

        # Redis keeps what a connection received for another second, and the last look may be older.
        await looked_again(memory)
        await eventually(lambda: memory.seen and memory.seen.used_bytes < 0.85 * LIMIT_BYTES)
        large = d.ingress.followers.request_ids  # without one that a full Redis did not take
        assert 5 <= len(large) <= 13
        used = await used_bytes()
        small = d.posted("Hi")  # the door is not shut for everybody
        await d.waiting(len(large) + 1)
        assert not small.done()
        for request_id in large:
            answer = await d.http.delete(f"/v1/requests/{request_id}")
            assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")

        async def is_freed() -> bool:
            return used - await used_bytes() > len(large) * len(LARGE)

        await eventually(is_freed)
        await d.waiting(1)
        await looked_again(memory)
        d.posted(LARGE)
        await d.waiting(2)


async def test_at_the_brim_every_accepted_request_ends(
    private_redis: PrivateRedis, namespace: str
) -> None:
    """What the engine would write at a time is more than Redis holds: 40 answers of 230 kB."""
    args = {"tokens_per_s": 1_000, "max_output_tokens": 0}
    settings = settings_of(private_redis.url, namespace, engine={"kind": "simulated", "args": args})
    async with in_process(settings) as d:
        used: int = (await private_redis.client.info("memory"))["used_memory"]
        await limit(d, private_redis, used + 4 * MIB)
        body = {"model": "hermes-tiny", "prompt": "Hi", "max_tokens": 700, "stream": True}
        posts = [d.http.post("/v1/completions", json=body) for _ in range(40)]
        answers = await asyncio.gather(*posts)
        assert "errorstat_OOM" not in await private_redis.client.info("errorstats")
        accepted = [answer for answer in answers if answer.status_code == 200]
        reasons = {one.headers["x-hermes-reason"] for one in answers if one not in accepted}
        assert reasons == {"storage_full"}
        assert len(accepted) > 10
        for answer in accepted:
            assert answer.text.count('"finish_reason":"length"') == 1


async def test_a_request_that_is_worked_on_waits_no_more(
    w: World, redis_url: str, namespace: str
) -> None:
    async with door(redis_url, namespace) as d:
        task = d.posted("Hi")
        (request_id,) = await d.waiting(1)
        await eventually(lambda: w.journals())
        await (await w.writer()).open(request_id, 1, b"nonce-1", OPENED)
        await eventually(lambda: len(d.ingress.limits.waiting) == 0)
        assert not task.done()


def keys(folder: Path, *tenants: str) -> dict[str, Any]:
    """Settings with a keys file in which each key is its tenant's name."""
    digests = {tenant: hashlib.sha256(tenant.encode()).hexdigest() for tenant in tenants}
    lines = [f"{tenant} sha256:{digest}\n" for tenant, digest in digests.items()]
    (folder / "keys").write_text("".join(lines))
    return {"required": True, "keys_file": str(folder / "keys")}


def bearer(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {tenant}"}


@pytest.mark.parametrize(
    "section", [{"ingress": {"max_connections": 4}}, {"queue": {"max_waiting_standard": 4}}]
)
async def test_a_tenant_that_takes_all_it_can_leaves_room_for_others(
    redis_url: str, namespace: str, tmp_path: Path, section: dict[str, Any]
) -> None:
    auth = keys(tmp_path, "acme", "zeta")
    async with door(redis_url, namespace, auth=auth, **section) as d:
        for _ in range(2):
            d.posted("Hi", **bearer("acme"))
        (mine, *_) = await d.waiting(2)
        refused = await d.post("Hi", **bearer("acme"))
        assert (refused.status_code, refused.headers["x-hermes-reason"]) == (429, "tenant_limit")
        d.posted("Hi", **bearer("zeta"))
        await d.waiting(3)
        ended = await d.http.delete(f"/v1/requests/{mine}", headers=bearer("acme"))
        assert ended.status_code == 200
        await d.waiting(2)
        d.posted("Hi", **bearer("acme"))
        await d.waiting(3)


async def test_a_tenants_request_is_unknown_to_every_other(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    auth = keys(tmp_path, "acme", "zeta")
    async with door(redis_url, namespace, auth=auth) as d:
        d.posted("Hi", **bearer("acme"))
        (mine,) = await d.waiting(1)
        for method, path in (("GET", ""), ("GET", "/events"), ("DELETE", "")):
            told, unknown = [
                await d.http.request(method, f"/v1/requests/{name}{path}", headers=bearer("zeta"))
                for name in (mine, "req_never")
            ]
            assert told.status_code == 404
            assert told.text == unknown.text.replace("req_never", mine)
        state = await d.http.get(f"/v1/requests/{mine}", headers=bearer("acme"))
        assert state.json()["state"] == "queued"


async def test_metrics_are_put_together_once_a_period_and_not_for_tenants(
    redis_url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auth = keys(tmp_path, "acme", "@metrics")
    async with door(redis_url, namespace, auth=auth, telemetry={"page_period_s": 60}) as d:
        made, make = [], d.ingress.metrics._make

        async def counted() -> bytes:
            made.append(1)
            return await make()

        monkeypatch.setattr(d.ingress.metrics, "_make", counted)
        pages = await asyncio.gather(
            *(d.http.get("/metrics", headers=bearer("@metrics")) for _ in range(50))
        )
        assert {page.status_code for page in pages} == {200}
        assert len(made) == len({page.text for page in pages}) == 1
        for headers, status in ((bearer("acme"), 403), ({}, 401)):
            assert (await d.http.get("/metrics", headers=headers)).status_code == status
        assert (await d.post("Hi", **bearer("@metrics"))).status_code == 403


async def test_what_redis_would_lose_is_told_on_readyz_and_in_the_log(
    private_redis: PrivateRedis,
    namespace: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timings, "REDIS_CHECK_AGAIN_S", 0.1)
    private_redis.run("CONFIG", "SET", "appendonly", "no", "maxmemory", 0)
    caplog.set_level(logging.WARNING)
    async with door(private_redis.url, namespace) as d:
        forgets, full = await eventually(lambda: d.ingress.redis_watch.warnings)
        assert (await d.http.get("/readyz")).json()["warnings"] == [forgets, full]
        assert "appendonly is no" in forgets
        assert "maxmemory is 0" in full
        assert caplog.text.count("appendonly is no") == 1
        await limit(d, private_redis, 8 << 30)
        await eventually(lambda: len(d.ingress.redis_watch.warnings) == 1)
        assert (await d.http.get("/readyz")).json()["warnings"] == [forgets]
        page = (await d.http.get("/metrics")).text
        assert "hermes_redis_limit_bytes 8.589934592e+09" in page
        assert "hermes_redis_used_bytes" in page


async def test_a_body_that_redis_does_not_take_is_too_large_and_said_beforehand(
    private_redis: PrivateRedis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "REDIS_CHECK_AGAIN_S", 0.05)
    bounds = {
        "proto-max-bulk-len": 512 * MIB,
        "client-query-buffer-limit": 1024 * MIB,
        "client-output-buffer-limit": "normal 0 0 0",
    }
    narrow = {"client-output-buffer-limit": f"normal {2 * MIB} 0 0"}

    async def refused(d: Door, text: str) -> bool:
        answer = await d.post(text)
        if answer.headers["x-hermes-reason"] != "body_too_large":
            return False
        assert answer.status_code == 413
        assert f"{len(text) // 1_000_000}," in answer.json()["error"]["message"], "names the size"
        assert "retry-after" not in answer.headers
        return True

    async with in_process(settings_of(private_redis.url, namespace)) as d:
        watch = d.ingress.redis_watch
        for name, wide in bounds.items():
            assert not watch.warnings
            # Redis's operator narrows it while the service runs: the first request finds out
            private_redis.run("CONFIG", "SET", name, narrow.get(name, 2 * MIB))
            if "output" not in name:  # that a worker cannot read a body is found at the next try
                assert await refused(d, LARGE), name
                assert await refused(d, LARGE + "x"), name
            monkeypatch.setattr(timings, "REDIS_SIZES_AGAIN_S", 0.0)
            watch.lost()
            await eventually(lambda: watch.warnings)
            assert "values of 16,777,216 bytes" in watch.warnings[0]
            assert (await d.http.get("/readyz")).json()["warnings"] == [*watch.warnings]
            assert (await d.post("x" * MIB)).status_code == 200, "what it takes is served"
            private_redis.run("CONFIG", "SET", name, wide)
            await eventually(lambda: not watch.warnings)
            monkeypatch.setattr(timings, "REDIS_SIZES_AGAIN_S", 1e6)
            assert (await d.post(LARGE)).status_code == 200, name


async def test_a_refused_body_is_gone_with_its_request(redis_url: str, namespace: str) -> None:
    """A cycle would keep it until Python's garbage collector comes, and no bound counts it."""
    async with door(redis_url, namespace) as d:
        body = {"model": "hermes-tiny", "prompt": "x" * 100_000, "max_tokens": -1}
        gc.collect()
        gc.disable()
        try:
            answer = await d.http.post("/v1/completions", json=body)
            assert answer.status_code == 400, answer.text
            await eventually(lambda: not any(isinstance(one, Upload) for one in gc.get_objects()))
        finally:
            gc.enable()


async def test_a_large_body_during_an_outage_is_not_too_large(
    private_redis: PrivateRedis, namespace: str
) -> None:
    async with door(private_redis.url, namespace) as d:
        private_redis.kill()
        for _ in range(3):
            answer = await d.post(LARGE)
            assert answer.headers["x-hermes-reason"] == "journal_unavailable"
