"""Three ingresses under 100 requests a second and bursts of 200, in virtual time: a tenant gets its
limits in every minute, no more and hardly less, whatever dies. Only counts are compared.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from serve_app.admission.admission import Receipt
from serve_app.errors import RequestRefused
from serve_app.policy.tenant_limits import MINUTE
from tests.journal.journal_helpers import PrivateRedis, World, world
from tests.journal.limited import BEGIN_MS, STILL, Clients, clients_of

A_SECOND, BURSTS, OF = 100, 10, 200
BURST_AT_S = {3 + 6 * number for number in range(BURSTS)}
TOKENS, LASTS_S = 20, 3
"""Of each request: what it reserves, and how long it runs."""


@pytest.fixture
def sections() -> dict[str, Any]:
    return STILL


@dataclass(eq=False)
class Load:
    """Sends what each second has, and ends what is due. `dead`: the ingress that has died."""

    clients: Clients
    accepted: Counter[int] = field(default_factory=Counter)
    """By minute."""
    most_at_once: int = 0
    left: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """The remaining tokens that clients were told, by minute, as they were accepted."""
    running: list[tuple[int, Receipt, int]] = field(default_factory=list)
    """Until which second, what, and at which ingress."""
    dead: int = -1

    async def second(self, second: int) -> None:
        self.clients.now_ms = BEGIN_MS + second * 1_000
        await self.end([one for one in self.running if one[0] <= second])
        many = A_SECOND + (OF if second in BURST_AT_S else 0)
        living = [at for at in range(len(self.clients.ingresses)) if at != self.dead]
        sending = (self.one(second, living[number % len(living)]) for number in range(many))
        await asyncio.gather(*sending)
        self.most_at_once = max(self.most_at_once, len(self.running))

    async def one(self, second: int, at: int) -> None:
        receipt = await self.clients.accepts(TOKENS // 2, at=at)
        if receipt is None:
            return
        assert receipt.standing
        self.accepted[second // 60] += 1
        self.left[second // 60].append(receipt.standing.tokens)
        self.running.append((second + LASTS_S, receipt, at))

    async def end(self, those: Sequence[tuple[int, Receipt, int]]) -> None:
        """A worker ends them, or others, from outside, where their ingress has died."""
        self.running = [one for one in self.running if one not in those]
        used = {"prompt": TOKENS // 2, "output": TOKENS // 2}
        ending = [
            self.clients.cancel(receipt)
            if at == self.dead
            else self.clients.answer(receipt, **used)
            for _, receipt, at in those
        ]
        await asyncio.gather(*ending)


CASES: list[tuple[dict[str, int], int, int]] = [
    ({"requests_per_minute": 600}, 600, 2),
    ({"tokens_per_minute": 12_000}, 600, 2),
    ({"concurrent_requests": 40}, 40 * 60 // LASTS_S, 1),
]
"""Limits, how many requests a minute they permit, and for how many minutes."""


@pytest.mark.parametrize(("limits", "a_minute", "minutes"), CASES, ids=str)
async def test_each_minute_has_what_the_limit_permits(
    w: World, limits: dict[str, int], a_minute: int, minutes: int
) -> None:
    async with clients_of(w, **limits) as clients:
        load = Load(clients)
        for second in range(60 * minutes):
            if second == 4:
                load.dead = 1  # what it has accepted runs
            await load.second(second)
        await load.end(load.running)
        assert load.most_at_once <= limits.get("concurrent_requests", 10_000)
        for minute in range(minutes):
            if "concurrent_requests" not in limits:
                assert load.accepted[minute] <= a_minute
            assert load.accepted[minute] >= 0.97 * a_minute
        kept = await clients.kept()
        assert (kept.get("c", 0), kept.get("b", 0)) == (0, 0)


async def test_what_is_left_never_rises_at_any_ingress(w: World) -> None:
    """Every reservation is there once, in the order in which Redis counted them."""
    async with clients_of(w, tokens_per_minute=3_000) as clients:
        load = Load(clients)
        for second in range(5):
            await load.second(second)
        told = load.left[0]
        assert sorted(told) == [TOKENS * (number + 1) for number in range(150)]


async def test_a_redis_that_starts_again_has_counted_all(
    private_redis: PrivateRedis, namespace: str
) -> None:
    limits = {"requests_per_minute": 300, "concurrent_requests": 60}
    async with (
        world(private_redis.url, namespace, **STILL) as w,
        clients_of(w, **limits) as clients,
    ):
        load = Load(clients)
        for second in range(20):
            if second == 2:
                private_redis.kill()
                await private_redis.start()
            await load.second(second)
        assert load.accepted[0] == 300
        await load.end(load.running)
        assert (await clients.kept()).get("c", 0) == 0


async def test_clients_that_come_back_when_they_are_told_are_accepted(w: World) -> None:
    """Two hundred that want one request each, of which each minute has place for 60, and that wait
    as `Retry-After` says: the first try after it finds a place, as long as there is one for all
    that come back, and whoever finds none knows how many were before it.
    """
    async with clients_of(w, requests_per_minute=60) as clients:
        waiting = 150
        firsts = again = found = 0
        while waiting:
            place = min(60, waiting)
            retry_ms = set[int]()
            taken = 0
            for _ in range(waiting):
                try:
                    await clients.send()
                    taken += 1
                except RequestRefused as refusal:
                    retry_ms.add(clients.now_ms + int((refusal.retry_after_s or 0) * 1000))
            if firsts:
                again += place
                found += taken
            firsts += 1
            waiting -= taken
            if retry_ms:
                (at_ms,) = retry_ms
                assert at_ms % MINUTE == 0
                clients.now_ms = at_ms
        assert found >= 0.99 * again
