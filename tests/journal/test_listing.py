"""`GET /v1/requests`: a tenant's latest requests, newest first."""

from __future__ import annotations

from typing import Any

import pytest

from tests.journal.in_process import Door, door
from tests.journal.journal_helpers import World
from tests.tables import Failures


async def page(at: Door, **query: Any) -> dict[str, Any]:
    found: dict[str, Any] = (await at.http.get("/v1/requests", params=query)).json()
    return found


def ids(found: dict[str, Any]) -> list[str]:
    return [one["id"] for one in found["data"]]


@pytest.mark.parametrize("a_look", [1, 2, 50])
async def test_pages_hold_each_request_once_newest_first(
    redis_url: str, namespace: str, a_look: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.ingress.objects_api._A_LOOK", a_look)
    async with door(redis_url, namespace) as at:
        assert (await page(at))["data"] == []
        posted = [await at.detached("x") for _ in range(5)]
        seen, after = list[str](), ""
        for more in (True, True, False):
            found = await page(at, limit=2, after=after)
            assert found["has_more"] == more
            seen += ids(found)
            after = found["last_id"]
        assert sorted(seen) == sorted(posted)
        admitted = [one["admitted_at_ms"] for one in (await page(at))["data"]]
        assert admitted == sorted(admitted, reverse=True)


async def test_state_and_class_choose_and_one_call_looks_at_so_many_at_most(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with door(redis_url, namespace) as at:
        first = await at.detached("x", "batch")
        others = [await at.detached("x") for _ in range(4)]
        await at.http.delete(f"/v1/requests/{others[0]}")
        assert ids(await page(at, state="cancelled")) == [others[0]]
        assert len(ids(await page(at, state="queued"))) == 4
        assert ids(await page(at, **{"class": "batch"})) == [first]
        assert (await page(at, state="failed"))["data"] == []
        monkeypatch.setattr("serve_app.ingress.objects_api._LOOKED_AT", 2)
        monkeypatch.setattr("serve_app.ingress.objects_api._A_LOOK", 2)
        seen, after, calls = list[str](), "", 0
        while True:
            found = await page(at, after=after, **{"class": "batch"})
            seen, after, calls = seen + ids(found), found["last_id"], calls + 1
            if not found["has_more"]:
                break
        assert (seen, calls) == ([first], 3)


async def test_what_is_gone_is_left_out_and_the_oldest_are_forgotten(
    w: World, redis_url: str, namespace: str
) -> None:
    async with door(redis_url, namespace, journal={"listed_requests": 3}) as at:
        posted = [await at.detached("x") for _ in range(5)]
        kept = ids(await page(at))
        assert len(kept) == 3
        assert set(kept) < set(posted)
        await w.redis.unlink(w.store.key(kept[1]))
        assert ids(await page(at)) == [kept[0], kept[2]]
        assert ids(await page(at, after=kept[1])) == [kept[2]], "it is still a place in the list"


WRONG: list[dict[str, Any]] = [{"state": "lost"}, {"class": "urgent"}, {"limit": 0}]
WRONG += [{"limit": "x"}, {"limit": 101}, {"after": "req_1"}, {"after": "x" * 65}]


async def test_what_cannot_be_meant_is_refused(redis_url: str, namespace: str) -> None:
    async with door(redis_url, namespace) as at:
        with Failures() as failures:
            for query in WRONG:
                with failures.of(query):
                    answer = await at.http.get("/v1/requests", params=query)
                    error = answer.json()["error"]
                    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
                    assert error["param"] in query
