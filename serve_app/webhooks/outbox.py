"""Events that wait to be delivered. `outbox.lua` has the scripts, and what each key holds.

The script that ends a request or a batch adds its event to a stream, exactly once, and only for
receivers of the settings, or that which was named with it. An ingress that is woken by the stream
moves it to the others of its receiver and tenant, a route.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec

from serve_app import timings
from serve_app.clock import RedisClock
from serve_app.redis.connection import Command, Script
from serve_app.redis.keyspace import (
    dead_deliveries_key,
    deliveries_key,
    delivery_counts_key,
    held_routes_key,
    outbox_key,
    routes_key,
)
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import Reply, answered
from serve_app.settings import Settings
from serve_app.webhooks.events import Delivery, deliveries

SCRIPT = Script(files(__package__).joinpath("outbox.lua").read_text())
TENANT_SHARE = 10
"""A tenant may have one delivery in so many of those that may wait."""

_encode = msgspec.json.encode
_decode = msgspec.json.Decoder(Delivery).decode


def telling(
    settings: Settings, event: str, subject: str, tenant: str, ended_ms: int, url: str = ""
) -> list[Command]:
    """The commands that tell everybody who wants to know of an end, for the script that ends it:
    exactly once. None if that is nobody.

    Args:
        event: its type, such as `batch.completed`.
        subject: the id of what has ended.
        url: the webhook that was named with it, which `check_url` has permitted; or nothing.
    """
    namespace, most = settings.namespace, settings.webhooks.max_waiting
    key, counts = outbox_key(namespace), delivery_counts_key(namespace)
    commands: list[Command] = []
    for one in deliveries(settings.webhooks, event, subject, tenant, ended_ms, url):
        commands += [
            ("XADD", key, "MAXLEN", "~", most, "*", "d", encoded(one)),
            ("HINCRBY", counts, "", 1),
        ]
    return commands


def encoded(delivery: Delivery) -> bytes:
    """As it stands in Redis."""
    return delivery.route.encode() + b"\n" + _encode(delivery)


class WaitingDelivery(NamedTuple):
    """A delivery that is due, and since when it waits (Unix milliseconds by Redis's clock)."""

    delivery: Delivery
    raw: bytes
    since_ms: int


class Filed(NamedTuple):
    """What a look at the stream has found: events, and deliveries that are dead for their number;
    what waits now, the oldest since then (0: nothing waits); and events that are lost, because the
    stream holds no more than may wait.
    """

    events: int
    dead: int
    waiting: int
    oldest_ms: int
    lost: int


class DeliveryResult(NamedTuple):
    """What has become of a delivery. It is delivered, unless it is tried again in `again_s`, or is
    dead because of `dead`.
    """

    of: WaitingDelivery
    again_s: float = 0.0
    dead: str = ""


class Dead(NamedTuple):
    """A delivery that was given up. `entry_id` contains the time, by Redis's clock."""

    entry_id: str
    reason: str
    delivery: Delivery


class Outbox:
    """What asks Redis raises `RedisUnavailable` if it cannot be reached.

    Args:
        waiting_link: of its own, since it is blocked until there is news.
    """

    def __init__(
        self, settings: Settings, link: RedisLink, waiting_link: RedisLink, clock: RedisClock
    ) -> None:
        self._settings, self._namespace = settings.webhooks, settings.namespace
        self._link, self._waiting, self._clock = link, waiting_link, clock
        self._seen: bytes = b"0-0"
        makers = (routes_key, deliveries_key, delivery_counts_key, held_routes_key)
        self._dead_key = dead_deliveries_key(self._namespace)
        self._stream = outbox_key(self._namespace)
        self._keys = (self._stream, *(make(self._namespace) for make in makers), self._dead_key)

    async def news(self, within_s: float) -> None:
        """Wait for an event that nobody has told of yet, but no longer than this."""
        block = ("XREAD", "COUNT", 1_000, "BLOCK", max(1, int(within_s * 1000)))
        reply = answered(await self._waiting.wait((*block, "STREAMS", self._stream, self._seen)))
        if reply:
            ((_, entries),) = reply
            self._seen = entries[-1][0]

    async def file(self) -> Filed:
        """Move new events into their routes."""
        most = self._settings.max_waiting
        bounds = most, most // TENANT_SHARE, self._settings.dead, timings.WEBHOOK_EVENTS_A_LOOK
        return Filed(*await self._call("file", *bounds))

    async def take(self, routes: int) -> dict[str, list[WaitingDelivery]]:
        """Hold routes that have something to do, and return what is due in each."""
        lease_ms = int(timings.WEBHOOK_LEASE_S * 1000)
        found = await self._call("take", lease_ms, routes, timings.WEBHOOKS_OF_A_ROUTE)
        return {route.decode(): _pairs(its) for route, *its in found}

    async def settle(
        self,
        route: str,
        results: Iterable[DeliveryResult],
        pause_s: float = 0.0,
        go_on: bool = True,
    ) -> list[WaitingDelivery]:
        """Note results, and return what is due next in the route, which stays held then. Without
        that, with a pause, or if nobody goes on, the route is let go.
        """
        now_ms, words = self._clock.now_ms(), list[object]()
        for of, again_s, dead in results:
            words += [of.raw, now_ms + int(again_s * 1000) if again_s else "", dead]
        most = timings.WEBHOOKS_OF_A_ROUTE if go_on else 0
        lease_ms, pause_ms = int(timings.WEBHOOK_LEASE_S * 1000), int(pause_s * 1000)
        its = lease_ms, route, pause_ms, self._settings.dead, most
        return _pairs(await self._call("settle", *its, *words))

    # -- dead ones --------------------------------------------------------------------------------

    async def dead(self) -> list[Dead]:
        """Those that are kept, oldest first."""
        (reply,) = await self._link.call([("XRANGE", self._dead_key, "-", "+")], large=True)
        found = []
        for entry_id, (_, raw, _, why) in answered(reply):
            found.append(Dead(entry_id.decode(), why.decode(), _read(raw)))
        return found

    async def again(self, entry_id: str) -> bool:
        """Deliver one, as if its event had just happened. Returns whether there is such a one."""
        return bool(await self._call("again", self._settings.dead, entry_id))

    async def drop(self, entry_id: str) -> bool:
        """Delete one. Returns whether there was such a one."""
        (reply,) = await self._link.call([("XDEL", self._dead_key, entry_id)])
        return bool(answered(reply))

    async def _call(self, step: str, *words: Any) -> Any:
        script = ("EVAL", SCRIPT, len(self._keys), *self._keys, step, self._clock.now_ms(), *words)
        (reply,) = await self._link.call([script])
        return answered(reply)


def _read(raw: bytes) -> Delivery:
    return _decode(raw.partition(b"\n")[2])


def _pairs(reply: Sequence[Reply]) -> list[WaitingDelivery]:
    pairs = zip(reply[::2], reply[1::2], strict=True)
    return [WaitingDelivery(_read(raw), raw, int(float(since))) for raw, since in pairs]
