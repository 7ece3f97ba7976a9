"""The door of an ingress on a real Redis: what admits requests, and what looks after them when their clients leave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from journal_helpers import World

from serve_app.ingress.admission import Admission
from serve_app.ingress.departures import Departures
from serve_app.ingress.waiting_room import WaitingRoom
from serve_app.journal.entries import RequestFacts
from serve_app.journal.hub import Follower, FollowerHub
from serve_app.journal.keyed import KeyedRequests
from serve_app.membership import Membership
from serve_app.redis_clock import RedisClock
from serve_app.storage import Storage
from serve_app.telemetry import Telemetry

BODY = b'{"prompt": "Hello"}'


class Door:
    """One ingress's, on a machine whose clock is wrong by `skew_s`."""

    def __init__(self, w: World, name: str, skew_s: float = 0.0) -> None:
        self.clock = RedisClock(lambda: time.time() + skew_s)
        self.hub = FollowerHub(w.settings, w.store, name)
        self.departures = Departures(w.settings, w.redis, w.store, self.hub, name, Telemetry(), self.clock)
        self.room = WaitingRoom(w.settings)
        keyed = KeyedRequests(w.settings, w.store, w.link)
        self.admission = Admission(
            w.settings, w.store, keyed, w.queue(name), self.hub, self.departures, Telemetry(), self.clock,
            Storage(w.settings), self.room,
        )  # fmt: skip

    async def post(self, key: str = "", body: bytes = BODY) -> tuple[Follower, RequestFacts]:
        """A client's request is admitted, or attached to another."""
        headers = {"idempotency-key": key} if key else {}
        return await self.admission.admit("tenant", "/v1/completions", "", headers, body, {}, "")

    async def quiet(self) -> None:
        """Until all clients that have left are looked after."""
        await asyncio.gather(*self.departures._tasks)


@asynccontextmanager
async def door(w: World, name: str = "ingress-1", skew_s: float = 0.0) -> AsyncIterator[Door]:
    """An open door, which knows Redis's clock."""
    made = Door(w, name, skew_s)
    membership = Membership(w.redis, w.settings.namespace, clock=made.clock)
    await membership.join_as_ingress(name, "session-1", lambda: False)
    try:
        yield made
    finally:
        await made.departures.stop()
        await membership.leave()


async def ending(w: World, request_id: str) -> str:
    """Why a request has ended; empty while it has not."""
    return next((entry.reason or entry.state for entry in await w.entries(request_id) if entry.ends), "")


async def journals(w: World) -> list[str]:
    """The ids of all requests that have a journal."""
    found = [key.decode() async for key in w.operator.scan_iter(f"{w.settings.namespace}:j:*")]
    return [key.rpartition(":")[2] for key in found]
