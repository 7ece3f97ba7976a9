"""A request that nobody can end holds its place among what its tenant may run until it has ended
for certain, and not longer. In virtual time.
"""

from __future__ import annotations

import secrets
from typing import Any

import pytest

from serve_app import timings
from serve_app.admission.admission import Receipt
from serve_app.contract import Reason
from serve_app.errors import RedisUnavailable
from serve_app.journal.entries import REQUEST_ID
from serve_app.policy.tenant_limits import MINUTE
from serve_app.redis.keyspace import limits_key, running_key
from serve_app.request_queue import QueueEntry
from tests.journal.journal_helpers import World
from tests.journal.limited import STILL, Clients, clients_of, without_reservation

LIMITS = {"concurrent_requests": 3, "background_tokens": 100}


@pytest.fixture
def sections() -> dict[str, Any]:
    return STILL


async def members(clients: Clients) -> list[bytes]:
    key = running_key(clients.w.settings.namespace, clients.tenant)
    return list(await clients.w.redis.zrange(key, 0, -1))


async def holds(clients: Clients) -> tuple[int, int]:
    """Places and background tokens; what is counted agrees with the members."""
    kept, found = await clients.kept(), await members(clients)
    tokens = sum(int(member.split()[1]) for member in found)
    assert (kept.get("c", 0), kept.get("b", 0)) == (len(found), tokens)
    return len(found), tokens


def ended_ms(receipt: Receipt) -> int:
    """When it has ended for certain."""
    return receipt.facts.deadline_ms + int(timings.ENDED_WITHIN_S * 1000)


async def loses(clients: Clients, receipt: Receipt, how: str) -> None:
    w, key = clients.w, clients.w.store.key(receipt.request_id)
    if how == "an older worker":
        await clients.answer(without_reservation(receipt))
    else:
        await w.operator.unlink(key)
    if how == "undecodable":
        await w.operator.xadd(key, {b"m": b"{"}, id=str(REQUEST_ID))
        entry = QueueEntry("s", "1-1", "standard", receipt.request_id, "t", "s", 1, 1)
        assert await w.endings.end_unreadable(entry)


@pytest.mark.parametrize("how", ["an older worker", "deleted", "undecodable"])
async def test_what_nobody_can_end_gives_its_place_back_in_time(w: World, how: str) -> None:
    async with clients_of(w, **LIMITS) as clients:
        lost = [await clients.send(20, background=True) for _ in range(2)]
        for receipt in lost:
            await loses(clients, receipt, how)
        clients.now_ms += 1_000
        stays = await clients.send(5, background=True)
        clients.now_ms = ended_ms(lost[0]) - 1
        assert (await clients.refused()).reason == Reason.CONCURRENCY_LIMIT
        assert await holds(clients) == (3, 90)
        clients.now_ms += 1
        taken = await clients.send(45, background=True)
        assert await holds(clients) == (2, 100)
        await clients.answer(stays)
        await clients.answer(taken)
        assert await holds(clients) == (0, 0)


async def test_an_end_that_comes_later_gives_back_only_tokens(w: World) -> None:
    async with clients_of(w, tokens_per_month=1_000, **LIMITS) as clients:
        late = await clients.send(20, background=True)
        clients.now_ms = ended_ms(late)
        await clients.send(10, background=True)
        before = await clients.kept()
        assert await holds(clients) == (1, 20)
        await clients.answer(late, 5, 5)
        after = {**before, "u": before["u"] - 30, "d": -30}
        assert await clients.kept() == after
        with pytest.raises(RedisUnavailable, match="exhausted"):
            await clients.answer(late, 5, 5)
        assert await clients.kept() == after
        assert await holds(clients) == (1, 20)


async def test_one_call_frees_a_bounded_number_also_if_it_refuses(w: World) -> None:
    async with clients_of(w, concurrent_requests=250, background_tokens=10_000) as clients:
        lost = [await clients.send(1, background=True) for _ in range(250)]
        clients.now_ms = ended_ms(lost[-1])
        fewer = clients.with_limits(concurrent_requests=10)
        for left in (150, 50):
            assert not await fewer.accepts()
            assert await holds(clients) == (left, 2 * left)
        await fewer.send()
        assert await holds(clients) == (1, 0)


async def test_a_full_redis_frees_nothing_and_takes_nothing(w: World) -> None:
    """It would accept whatever a script writes after a deletion."""
    async with clients_of(w, **LIMITS) as clients:
        lost = await clients.send(20, background=True)
        clients.now_ms = ended_ms(lost)
        async with w.full():
            with pytest.raises(RedisUnavailable):
                await clients.send()
        assert await holds(clients) == (1, 40)
        await clients.send()
        assert await holds(clients) == (1, 0)


async def test_a_request_that_comes_again_has_one_place(w: World) -> None:
    """Its journal was lost, and its idempotency key gives it the same id."""
    async with clients_of(w, **LIMITS) as clients:
        for _ in range(2):
            receipt = await clients.send(10, background=True, key="a key")
            assert await holds(clients) == (1, 20)
            await w.operator.unlink(w.store.key(receipt.request_id))
            clients.now_ms += MINUTE


async def test_what_an_older_version_has_counted_is_replaced(w: World) -> None:
    """It knows no members, and reads what this version writes."""
    async with clients_of(w, **LIMITS) as clients:
        receipt = await clients.send(10, background=True)
        key, minute = limits_key(w.settings.namespace, "t"), clients.now_ms // MINUTE
        await clients.answer(receipt)
        await w.redis.set(key, f"{minute} 0 0 3 20 9 90 0 {secrets.token_hex(4)}")
        await clients.send(10, background=True)
        assert await holds(clients) == (1, 20)


async def test_who_has_neither_limit_has_no_members(w: World) -> None:
    async with clients_of(w, requests_per_minute=9, tokens_per_month=1_000) as clients:
        receipt = await clients.send(10, background=True)
        assert await holds(clients) == (0, 0)
        await clients.answer(receipt)
        assert await holds(clients) == (0, 0)


async def test_members_expire_with_what_their_tenant_has_used(w: World) -> None:
    async with clients_of(w, **LIMITS) as clients:
        await clients.send()
        key = running_key(w.settings.namespace, "t")
        assert 0 < await w.redis.pttl(key) <= timings.LIMITS_KEPT_MS
