"""Clients that leave: who reads is known to all ingresses, and what nobody reads is cancelled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from journal_helpers import World, world

from serve_app.ingress.departures import Departures
from serve_app.journal.hub import FollowerHub
from serve_app.membership import Membership
from serve_app.redis_clock import RedisClock
from serve_app.telemetry import Telemetry


@asynccontextmanager
async def ingress(w: World, name: str, skew_s: float = 0.0) -> AsyncIterator[tuple[FollowerHub, Departures]]:
    """The readers of one ingress, on a machine whose clock is wrong by `skew_s`."""
    clock = RedisClock(lambda: time.time() + skew_s)
    membership = Membership(w.redis, w.settings.namespace, clock=clock)
    await membership.join_as_ingress(name, "session-1", lambda: False)
    hub = FollowerHub(w.settings, w.store, name)
    departures = Departures(w.settings, w.redis, w.store, hub, name, Telemetry(), clock)
    try:
        yield hub, departures
    finally:
        await departures.stop()
        await membership.leave()


async def reason(w: World, request_id: str = "req_1") -> str:
    """Why the request has ended; empty while it has not."""
    return next((entry.reason for entry in await w.entries(request_id) if entry.ends), "")


async def quiet(departures: Departures) -> None:
    """Until everything that the departures look after is settled."""
    await asyncio.gather(*departures._tasks)


def short(**ingress_settings: Any) -> dict[str, Any]:
    return {"ingress": {"disconnect_grace_s": 0.05, **ingress_settings}}


def test_a_request_that_is_read_elsewhere_is_not_cancelled_though_clocks_differ(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace, **short()) as w:
            await w.admit()
            async with ingress(w, "ahead", +4) as (hub, departures), ingress(w, "behind", -4) as (_, elsewhere):
                follower = await hub.follow("req_1", 0)
                await elsewhere.arrived("req_1")
                departures.left(follower, departed=True)
                await quiet(departures)
                assert await reason(w) == ""

    asyncio.run(main())


def test_a_request_that_nobody_reads_any_more_is_cancelled(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace, **short()) as w:
            await w.admit()
            async with ingress(w, "ingress-1") as (hub, departures):
                departures.left(await hub.follow("req_1", 0), departed=True)
                await quiet(departures)
                assert await reason(w) == "client_disconnected"

    asyncio.run(main())
