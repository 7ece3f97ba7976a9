"""Receivers of webhooks on real sockets, and senders that may die at any time."""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any

from openai import OpenAI
from standardwebhooks import Webhook

from serve_app import timings
from serve_app.clock import RedisClock
from serve_app.loops import Loops, ended
from serve_app.observability.metrics import Telemetry
from serve_app.redis.connection import Command
from serve_app.redis.keyspace import deliveries_key, outbox_key, routes_key
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import Reply, all_answered
from serve_app.settings import Settings
from serve_app.webhooks.outbox import Outbox, telling
from serve_app.webhooks.sender import Sender
from tests.http_server import Asked, Server
from tests.journal.journal_helpers import World

SECRET = "whsec_" + base64.b64encode(b"a secret of these tests.").decode()
_SDK = OpenAI(api_key="k")


def verified(asked: Asked) -> dict[str, Any]:
    """The event that was posted, whose signature OpenAI's SDK and that of Standard Webhooks have
    accepted.
    """
    assert (asked.method, asked.headers["content-type"]) == ("POST", "application/json")
    event = _SDK.webhooks.unwrap(asked.body, asked.headers, secret=SECRET)
    assert event.id == asked.headers["webhook-id"]
    found: dict[str, Any] = Webhook(SECRET).verify(asked.body, asked.headers)
    return found


def subjects(server: Server) -> Counter[str]:
    """How often each end was told."""
    return Counter(verified(asked)["data"]["id"] for asked in list(server.asked))


def receivers(**urls: str) -> dict[str, Any]:
    """The section `webhooks` with these endpoints."""
    return {"endpoints": {name: {"url": url, "secret": "env:HOOKS"} for name, url in urls.items()}}


def per_request(**more: Any) -> dict[str, Any]:
    """The section `webhooks` in which a request may name a URL of this machine."""
    free = {"plain_http": True, "private_addresses": True}
    return {"hosts": ["127.0.0.1", "localhost"], "secret": "env:HOOKS", **free, **more}


async def waiting(w: World) -> int:
    """How many events have not been delivered."""
    keys = deliveries_key(w.settings.namespace), outbox_key(w.settings.namespace)
    return int(await w.redis.zcard(keys[0]) + await w.redis.xlen(keys[1]))


def world_with(w: World, **webhooks: Any) -> World:
    """The same with receivers."""
    sections = {**w.settings.model_dump(exclude_unset=True), "webhooks": webhooks}
    w.settings = type(w.settings).model_validate(sections)
    return w


async def nothing_waits(w: World) -> bool:
    return not await waiting(w) and not await w.redis.exists(routes_key(w.settings.namespace))


async def tell(link: RedisLink, settings: Settings, *subjects: str, tenant: str = "t") -> None:
    """These end: what their scripts write for the receivers of the settings."""
    now_ms = RedisClock().now_ms()
    its = settings, "response.completed"
    commands = [telling(*its, subject, tenant, now_ms) for subject in subjects]
    all_answered(await link.call([*chain.from_iterable(commands)]))


class Killed(RedisLink):
    """Redis's answers stop before or after the n-th step; so does the sender, as if killed."""

    def __init__(self, settings: Settings, at: int = 0, after: bool = False) -> None:
        super().__init__(settings.redis)
        self.at, self.after, self.steps = at, after, 0
        self.dead = asyncio.Event()

    async def call(self, commands: Sequence[Command], large: bool = False) -> list[Reply]:
        self.steps += 1
        if self.steps != self.at:
            return await super().call(commands, large)
        if self.after:
            await super().call(commands, large)
        self.dead.set()
        return await asyncio.Event().wait()  # type: ignore[return-value] # it never returns


@asynccontextmanager
async def sender(
    settings: Settings, link: RedisLink | None = None, telemetry: Telemetry | None = None
) -> AsyncIterator[Sender]:
    """A sender that is killed at the end: it lets go of nothing."""
    loops, clock = Loops(), RedisClock()
    link, news = link or RedisLink(settings.redis), RedisLink(settings.redis)
    outbox = Outbox(settings, link, news, clock)
    made = Sender(settings.webhooks, outbox, clock, loops, telemetry or Telemetry())
    await made.start()
    try:
        yield made
    finally:
        await loops.stop()
        await ended(made._working.values())
        await made._poster.stop()
        await news.close()
        await link.close()


def quick(monkeypatch: Any) -> Callable[[str, float], None]:
    """The sender looks all the time, and its secret is known. Returns what sets a time of it."""
    monkeypatch.setenv("HOOKS", SECRET)
    monkeypatch.setattr(timings, "WEBHOOK_LOOK_S", 0.01)
    return lambda name, value: monkeypatch.setattr(timings, name, value)
