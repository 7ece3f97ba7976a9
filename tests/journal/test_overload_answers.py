"""What clients of an overloaded service are told, and what `/v1/capacity` shows to whom."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from serve_app.policy.overload import Overload, Reading
from tests.journal.in_process import door, keys_of

CHAT = {"model": "hermes-tiny", "messages": [{"role": "user", "content": "Tell me of the sea."}]}


def overloaded(its: Overload, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on 25 s of `standard` requests wait, and no reading of the members changes that."""
    reading = Reading(10, 10, frozenset(("standard",)))
    first_ms = 10**12
    its.told(reading, first_ms)
    for _ in range(40):
        its.started("standard", "default", 100.0)
    its.told(reading, first_ms + 10_000)
    its.enters("standard", "default", 100 * 100.0)
    its.told(reading, first_ms + 10_000)
    monkeypatch.setattr(its, "told", lambda *_: None)


async def test_an_open_breaker_makes_background_work_of_what_allows_it(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with door(redis_url, namespace, queue={"async_above_s": 20.0}) as at:
        overloaded(at.ingress.overload, monkeypatch)
        path = "/v1/chat/completions"
        for headers in ({"x-hermes-overload": "async"}, {"prefer": "respond-async"}):
            answer = await at.http.post(path, json=CHAT, headers=headers)
            assert answer.status_code == 202
            assert answer.headers["preference-applied"] == "respond-async"
            its = await at.http.get(answer.headers["location"])
            assert its.json()["state"] == "queued"
        refused = await at.http.post(path, json=CHAT)
        assert refused.status_code == 503
        assert refused.headers["x-hermes-reason"] == refused.json()["error"]["code"] == "overloaded"
        after_s = int(refused.headers["retry-after-ms"]) / 1000
        assert 15.0 <= after_s <= 20.0, "also those in the background wait now"
        assert after_s <= int(refused.headers["retry-after"]) <= after_s + 1
        assert "x-should-retry" not in refused.headers
        messages = {**CHAT, "max_tokens": 9}
        told = await at.http.post("/v1/messages", json=messages)
        assert told.status_code == 529
        assert told.json()["error"]["type"] == "overloaded_error"
        wrong = await at.http.post(path, json=CHAT, headers={"x-hermes-overload": "later"})
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"] == "x-hermes-overload"
        page = (await at.http.get("/v1/capacity")).json()
        shown = page["classes"]["standard"]
        assert (shown["breaker"], page["classes"]["batch"]["breaker"]) == ("open", "closed")
        assert 25.0 <= shown["estimated_wait_s"] <= 30.0
        assert shown["drain_cost_per_s"] == pytest.approx(400.0)


async def test_requests_that_are_wrong_open_no_breaker(redis_url: str, namespace: str) -> None:
    async with door(redis_url, namespace, queue={"async_above_s": 0.001}) as at:
        json = {"content-type": "application/json"}
        for _ in range(1_000):
            answer = await at.http.post("/v1/chat/completions", content=b"{", headers=json)
            assert answer.status_code == 400
        its = at.ingress.overload
        at.ingress.dispatcher.on_members(at.ingress.membership.members)
        assert its.open == set()
        assert its.load(0).flows == Overload().load(0).flows


@pytest.mark.nightly  # it needs thousands of file descriptors
async def test_connections_without_requests_open_no_breaker(redis_url: str, namespace: str) -> None:
    """Half of them have begun to send one."""
    async with door(redis_url, namespace, queue={"async_above_s": 0.001}) as at:
        begun = b"POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\n"
        opened = []
        for number in range(2_048):
            _, writer = await asyncio.open_connection("127.0.0.1", at.port)
            writer.write(begun * (number % 2))
            opened.append(writer)
        await asyncio.gather(*(writer.drain() for writer in opened))
        at.ingress.dispatcher.on_members(at.ingress.membership.members)
        assert at.ingress.overload.open == set()
        page = (await at.http.get("/v1/capacity")).json()
        assert {one["breaker"] for one in page["classes"].values()} == {"closed"}
        for writer in opened:
            writer.close()


async def test_a_tenant_sees_its_own_part_of_the_load_only(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    auth = {**keys_of(tmp_path, "acme", "zeta", "ops"), "admin_tenants": ["ops"]}
    async with door(redis_url, namespace, auth=auth) as at:

        async def shown(tenant: str) -> dict[str, Any]:
            headers = {"authorization": f"Bearer {tenant}"}
            answer = await at.http.get("/v1/capacity", headers=headers)
            assert answer.status_code == 200
            found: dict[str, Any] = answer.json()
            return found

        at.posted("Tell me of the sea.", authorization="Bearer acme")
        await at.waiting(1)
        of_acme, of_zeta, of_all = await shown("acme"), await shown("zeta"), await shown("ops")
        assert (of_acme["tenant"], of_acme["classes"]["standard"]["waiting"]) == ("acme", 1)
        assert "critical" not in of_acme["classes"]
        assert of_zeta["classes"]["standard"]["waiting"] == 0
        assert of_acme.keys() == of_zeta.keys()
        assert "data" not in of_acme
        assert of_all["classes"]["standard"]["waiting_cost"] > 0
        assert of_all["data"] == [
            {
                "model": "hermes-tiny",
                "replicas": 0,
                "sequences_running": 0,
                "sequences_waiting": 0,
                "kv_tokens": 0,
                "kv_used": None,
            }
        ]
        assert (await at.http.get("/v1/capacity")).status_code == 401
