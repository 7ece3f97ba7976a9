"""A full Redis, and clients that want more than their share: a real ingress on a real socket, and a
real Redis.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from scripts.local import redis_server
from serve_app.journal.writer import JournalWriter
from serve_app.policy.classes import CLASSES
from tests.journal.in_process import Door, door
from tests.journal.journal_helpers import OPENED, PrivateRedis
from tests.waiting import eventually

MIB = 1 << 20
LIMIT_BYTES = 64 * MIB
LARGE = "x" * (4 * MIB)


async def limit(d: Door, url: str, limit_bytes: int = LIMIT_BYTES) -> None:
    async with Redis.from_url(redis_server.as_operator(url), protocol=2) as operator:
        await operator.config_set("maxmemory", limit_bytes)
    await eventually(
        lambda: (
            d.ingress.limits.memory.seen and d.ingress.limits.memory.seen.limit_bytes == limit_bytes
        )
    )


async def fill(d: Door, tasks: list[asyncio.Task[object]]) -> str:
    """Submit large requests that wait, until one is refused; returns the reason."""
    while True:
        waiting = len(tasks)
        task = d.posted(LARGE, **{"x-hermes-class": CLASSES[1 + waiting % 3]})
        await eventually(lambda: task.done() or len(d.ingress.followers.request_ids) > waiting)  # noqa: B023
        if task.done():
            assert task.result().status_code == 429
            assert int(task.result().headers["retry-after"]) >= 1
            return task.result().headers["x-hermes-reason"]
        tasks.append(task)


async def leave(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_large_requests_cannot_fill_redis_and_deleting_makes_room(
    private_redis: PrivateRedis, namespace: str
) -> None:
    async with door(private_redis.url, namespace) as d:
        await limit(d, private_redis.url)
        tasks: list[asyncio.Task[object]] = []
        assert await fill(d, tasks) == "storage_full"
        assert 5 <= len(tasks) <= 13
        large = list(d.ingress.followers.request_ids)
        used = (await d.ingress.base.redis.info("memory"))["used_memory"]
        assert used < 0.85 * LIMIT_BYTES
        small = d.posted("Hi")  # the door is not shut for everybody
        await eventually(lambda: len(d.ingress.followers.request_ids) == len(large) + 1)
        assert not small.done()
        for request_id in large:
            answer = await d.http.delete(f"/v1/requests/{request_id}")
            assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
        assert (await d.ingress.base.redis.info("memory"))["used_memory"] < used - len(large) * len(
            LARGE
        )
        await eventually(lambda: len(d.ingress.limits.waiting) == 1)
        for _ in range(2):  # looks
            seen = d.ingress.limits.memory.seen
            await eventually(lambda: d.ingress.limits.memory.seen is not seen)  # noqa: B023
        again = d.posted(LARGE)
        await eventually(lambda: len(d.ingress.followers.request_ids) == 2)
        await leave([*tasks, small, again])


async def test_a_redis_that_is_full_nevertheless_can_be_freed(
    private_redis: PrivateRedis, namespace: str
) -> None:
    async with door(private_redis.url, namespace) as d:
        await limit(d, private_redis.url)
        tasks: list[asyncio.Task[object]] = []
        await fill(d, tasks)
        used = (await d.ingress.base.redis.info("memory"))["used_memory"]
        await limit(d, private_redis.url, used - 2 * MIB)
        (one, *_) = d.ingress.followers.request_ids
        answer = await d.http.delete(f"/v1/requests/{one}")
        assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
        await leave(tasks)


async def test_looking_at_a_large_waiting_request_costs_redis_nothing(
    private_redis: PrivateRedis, namespace: str
) -> None:
    async with door(private_redis.url, namespace) as d:
        task = d.posted("x" * (15 * MIB))
        await eventually(lambda: d.ingress.followers.request_ids)
        (request_id,) = d.ingress.followers.request_ids
        await eventually(lambda: d.ingress.base.redis.exists(d.ingress.base.store.key(request_id)))
        async with Redis.from_url(
            redis_server.as_operator(private_redis.url), protocol=2
        ) as operator:
            await operator.config_resetstat()
            before = (await operator.info("memory"))["used_memory"]
            answers = await asyncio.gather(
                *(d.http.get(f"/v1/requests/{request_id}") for _ in range(60))
            )
            info = await operator.info()
        assert {answer.json()["state"] for answer in answers} == {"queued"}
        print(
            f"60 looks: {info['total_net_output_bytes']} bytes sent, peak "
            f"{info['used_memory_peak'] - before}"
        )
        assert info["total_net_output_bytes"] < MIB
        await leave([task])


async def test_a_request_that_is_worked_on_waits_no_more(redis_url: str, namespace: str) -> None:
    async with door(redis_url, namespace) as d:
        task = d.posted("Hi")
        (request_id,) = await d.waiting(1)
        base = d.ingress.base
        await eventually(lambda: base.redis.exists(base.store.key(request_id)))
        writer = JournalWriter(d.ingress.settings)
        await writer.start()
        await writer.open(request_id, 1, b"nonce-1", OPENED)
        await eventually(lambda: len(d.ingress.limits.waiting) == 0)
        assert not task.done()
        await leave([task])
        await writer.stop()


async def test_a_redis_that_does_not_say_how_full_it_is_bounds_nothing(
    private_redis: PrivateRedis, namespace: str
) -> None:
    """For example, with the ACL of an older version."""
    async with door(private_redis.url, namespace) as d:
        async with Redis.from_url(
            redis_server.as_operator(private_redis.url), protocol=2
        ) as operator:
            await operator.execute_command("ACL", "SETUSER", "hermes", "-info")  # type: ignore[no-untyped-call]
        await eventually(lambda: d.ingress.limits.memory.seen is None)
        task = d.posted("Hi")
        await d.waiting(1)
        assert "hermes_redis_used_bytes" not in (await d.http.get("/metrics")).text
        assert not d.ingress.limits.memory.warnings
        await leave([task])


def keys_file(folder: Path, *tenants: str) -> str:
    """A keys file in which each key is its tenant's name."""
    lines = [
        f"{tenant} sha256:{hashlib.sha256(tenant.encode()).hexdigest()}\n" for tenant in tenants
    ]
    (folder / "keys").write_text("".join(lines))
    return str(folder / "keys")


def bearer(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {tenant}"}


@pytest.mark.parametrize(
    "section", [{"ingress": {"max_connections": 4}}, {"queue": {"max_waiting_standard": 4}}]
)
async def test_a_tenant_that_takes_all_it_can_leaves_room_for_others(
    redis_url: str, namespace: str, tmp_path: Path, section: dict[str, Any]
) -> None:
    auth = {"required": True, "keys_file": keys_file(tmp_path, "acme", "zeta")}
    async with door(redis_url, namespace, auth=auth, **section) as d:
        tasks = [d.posted("Hi", **bearer("acme")) for _ in range(2)]
        (mine, *_) = await d.waiting(2)
        refused = await d.post("Hi", **bearer("acme"))
        assert (refused.status_code, refused.headers["x-hermes-reason"]) == (429, "tenant_limit")
        tasks.append(d.posted("Hi", **bearer("zeta")))
        await d.waiting(3)
        assert (
            await d.http.delete(f"/v1/requests/{mine}", headers=bearer("acme"))
        ).status_code == 200
        await d.waiting(2)
        tasks.append(d.posted("Hi", **bearer("acme")))
        await d.waiting(3)
        await leave(tasks)


async def test_a_tenants_request_is_unknown_to_every_other(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    auth = {"required": True, "keys_file": keys_file(tmp_path, "acme", "zeta")}
    async with door(redis_url, namespace, auth=auth) as d:
        task = d.posted("Hi", **bearer("acme"))
        (mine,) = await d.waiting(1)
        for method, path in (("GET", ""), ("GET", "/events"), ("DELETE", "")):
            url = f"/v1/requests/{mine}{path}"
            told = await d.http.request(method, url, headers=bearer("zeta"))
            unknown = await d.http.request(
                method, url.replace(mine, "req_never"), headers=bearer("zeta")
            )
            assert told.status_code == 404
            assert told.text == unknown.text.replace("req_never", mine)
        state = await d.http.get(f"/v1/requests/{mine}", headers=bearer("acme"))
        assert state.json()["state"] == "queued"
        await leave([task])


@pytest.mark.parametrize(("page_period_s", "times"), [(60, 1), (0, 50)])
async def test_metrics_are_put_together_once_a_period_and_not_for_tenants(
    redis_url: str,
    namespace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    page_period_s: float,
    times: int,
) -> None:
    auth = {"required": True, "keys_file": keys_file(tmp_path, "acme", "@metrics")}
    telemetry = {"page_period_s": page_period_s}
    async with door(redis_url, namespace, auth=auth, telemetry=telemetry) as d:
        made, make = [], d.ingress.metrics._make

        async def counted() -> bytes:
            made.append(1)
            return await make()

        monkeypatch.setattr(d.ingress.metrics, "_make", counted)
        pages = await asyncio.gather(
            *(d.http.get("/metrics", headers=bearer("@metrics")) for _ in range(50))
        )
        assert {page.status_code for page in pages} == {200}
        assert len(made) == times
        assert len({page.text for page in pages}) == 1 or times > 1
        for headers, status in ((bearer("acme"), 403), ({}, 401)):
            assert (await d.http.get("/metrics", headers=headers)).status_code == status
        assert (await d.post("Hi", **bearer("@metrics"))).status_code == 403


async def test_readyz_reports_problems_with_redis(
    private_redis: PrivateRedis, namespace: str
) -> None:
    async with door(private_redis.url, namespace) as d:
        await limit(d, private_redis.url, 0)
        await eventually(lambda: d.ingress.limits.memory.warnings)
        assert "maxmemory is 0" in (await d.http.get("/readyz")).json()["warnings"][0]
        await limit(d, private_redis.url, 8 << 30)
        await eventually(lambda: not d.ingress.limits.memory.warnings)
        page = (await d.http.get("/metrics")).text
        assert "hermes_redis_limit_bytes 8.589934592e+09" in page
        assert "hermes_redis_used_bytes" in page
