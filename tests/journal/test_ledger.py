"""The ledger: every request that has ended is in it once, with what its journal says it used."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from serve_app.contract import FINAL, Reason, State
from serve_app.errors import Fenced
from serve_app.journal.ledger import Row, Whose, sums
from serve_app.redis.keyspace import usage_key
from serve_app.request_queue import QueueEntry
from tests.journal.in_process import Door, door, in_process, settings_of
from tests.journal.journal_helpers import (
    OPENED,
    PrivateRedis,
    World,
    add,
    added,
    complete,
    finish,
    world,
)
from tests.tables import Failures

ROW = Whose("t", "", "standard", "hermes-tiny")


async def ledger(w: World) -> dict[Any, Row]:
    """Everything in it, by whose it is."""
    pattern = usage_key(w.settings.namespace, 0).removesuffix("0") + "*"
    found: dict[Any, Row] = {}
    async for key in w.operator.scan_iter(pattern):
        hour = int(key.decode().rpartition(":")[2])
        (period,) = await sums(w.link, w.settings.namespace, range(hour, hour + 1), lambda one: one)
        for one, row in period.items():
            found[one] = found[one] + row if one in found else row
        assert (
            0 < await w.operator.pttl(key) <= w.settings.journal.usage_retention_days * 86_400_000
        )
    return found


async def counts(w: World) -> tuple[tuple[int, ...], int]:
    """How many requests ended, by state, and the tokens of their output."""
    row = (await ledger(w))[ROW]
    return row.states, row.usage.output


def ended(state: State, many: int = 1) -> tuple[int, ...]:
    return tuple(many if one is state else 0 for one in FINAL)


async def test_a_worker_and_everybody_else_book_each_ending_once(w: World) -> None:
    attempt = await w.started()
    for number in (1, 2, 3):
        await added(attempt, number)
    await complete(attempt)
    assert await counts(w) == (ended(State.COMPLETED), 3)
    assert not await w.endings.end("req_1", Reason.CANCELLED)
    assert await counts(w) == (ended(State.COMPLETED), 3)
    await w.admit("req_2")
    assert await w.endings.end("req_2", Reason.DEADLINE)
    attempt, _ = await (await w.writer()).open(await w.admit("req_3"), 1, b"nonce", OPENED)
    assert await w.endings.end("req_3", Reason.CANCELLED)
    finish(attempt)
    with pytest.raises(Fenced):
        await attempt.closed
    row = (await ledger(w))[ROW]
    assert row.states == (1, 0, 1, 1)
    assert (row.attempts, row.requests) == (2, 3)
    assert row.queued_ms >= 0 <= row.running_ms


@pytest.mark.parametrize("dead", [False, True], ids=["", "after an attempt that has died"])
async def test_what_is_cancelled_is_booked_as_far_as_its_journal_says(w: World, dead: bool) -> None:
    attempt = await w.started()
    for number in (1, 2):
        await added(attempt, number)
    record = await w.store.record("req_1")
    if dead:
        await w.opened(await w.writer(), 2, b"nonce-2")
        await w.opened(await w.writer(), 3, b"nonce-3")
    else:
        await added(attempt, 3)  # after the record was read
    assert await w.endings.end("req_1", Reason.CANCELLED, record)
    assert await counts(w) == (ended(State.CANCELLED), 2 if dead else 3)
    found = await w.store.record("req_1")
    assert found
    assert found.used
    assert found.used.output == (2 if dead else 3)
    assert (await ledger(w))[ROW].attempts == (3 if dead else 1)


async def test_a_redis_that_comes_back_older_has_every_ending_once(
    private_redis: PrivateRedis, namespace: str
) -> None:
    async with world(private_redis.url, namespace) as w:
        writer = await w.writer()
        attempts = []
        for number in range(4):
            await w.admit(name := f"req_{number}")
            attempts.append((await writer.open(name, 1, b"nonce", OPENED))[0])
            await added(attempts[-1], 1)
        await complete(attempts[0])
        private_redis.kill()
        private_redis.remember()
        await private_redis.start()
        for attempt in attempts[1:3]:
            finish(attempt)
        await asyncio.gather(*(attempt.closed for attempt in attempts[1:3]))
        private_redis.kill()
        private_redis.forget()
        finish(attempts[3])
        await private_redis.start()
        await attempts[3].closed
        assert await counts(w) == (ended(State.COMPLETED, 2), 2)
        # The two that nobody works on any more go on, and end again.
        again = await w.writer()
        for name in ("req_1", "req_2"):
            attempt, _ = await again.open(name, 2, b"other", OPENED)
            add(attempt, 1)
            await complete(attempt)
        assert await counts(w) == (ended(State.COMPLETED, 4), 4)


async def test_a_journal_that_nobody_can_read_is_booked_by_its_queue_entry(w: World) -> None:
    await w.admit()
    await w.redis.unlink(w.store.key("req_1"))
    await w.redis.xadd(w.store.key("req_1"), {b"m": b"{"}, id="0-1")
    entry = QueueEntry("s", "1-1", "batch", "req_1", "t", "s", 1, 1)
    assert await w.endings.end_unreadable(entry)
    found = await ledger(w)
    assert {one: row.states for one, row in found.items()} == {
        ROW._replace(request_class="batch"): ended(State.FAILED)
    }


# -- through a service ---------------------------------------------------------------------------


async def usage(d: Door, path: str = "/v1/usage", **params: Any) -> list[Mapping[str, Any]]:
    answer = await d.http.get(path, params=params)
    assert answer.status_code == 200, answer.text
    return [result for bucket in answer.json()["data"] for result in bucket["results"]]


async def test_the_page_of_a_request_and_the_ledger_say_the_same(
    redis_url: str, namespace: str
) -> None:
    async with in_process(settings_of(redis_url, namespace)) as d:
        described = []
        for number, stream in ((3, False), (5, True)):
            body = {"model": "hermes-tiny", "prompt": "x" * 40, "max_tokens": number}
            answer = await d.http.post("/v1/completions", json={**body, "stream": stream})
            page = f"/v1/requests/{answer.headers['x-request-id']}"
            described.append((await d.http.get(page)).json()["usage"])
        (result,) = await usage(d)
        names = {"input_tokens": "prompt_tokens", "output_tokens": "output_tokens"}
        for theirs, ours in names.items():
            assert result[theirs] == sum(one[ours] for one in described)
        assert result["output_tokens"] == 8
        assert (result["num_model_requests"], result["states"]["completed"]) == (2, 2)
        (same,) = await usage(
            d, "/v1/organization/usage/completions", **{"group_by[]": ["model", "project_id"]}
        )
        assert (same["model"], same["project_id"]) == ("hermes-tiny", "default")
        assert await usage(d, models="another") == []
        assert await usage(d, batch="true") == []


async def test_buckets_come_in_pages(redis_url: str, namespace: str) -> None:
    async with in_process(settings_of(redis_url, namespace)) as d:
        params: dict[str, Any] = {"start_time": 0, "end_time": 10 * 86_400, "limit": 4}
        begins: list[int] = []
        while True:
            page = (await d.http.get("/v1/usage", params=params)).json()
            begins += [bucket["start_time"] for bucket in page["data"]]
            if not page["has_more"]:
                break
            params["page"] = page["next_page"]
        assert begins == [day * 86_400 for day in range(10)]


WRONG: list[dict[str, Any]] = [{"bucket_width": "1m"}, {"group_by": "user"}]
WRONG += [{"limit": 32}, {"limit": 0}, {"start_time": -1}, {"start_time": 10**30}]
WRONG += [{"page": "page_x"}, {"page": "page_" + "9" * 20}, {"models": ["m"] * 101}]


async def test_what_cannot_be_asked_is_a_400(redis_url: str, namespace: str) -> None:
    async with door(redis_url, namespace) as d:
        with Failures() as failures:
            for params in WRONG:
                with failures.of(params):
                    answer = await d.http.get("/v1/usage", params=params)
                    assert answer.status_code == 400
                    assert answer.json()["error"]["param"] in params
