"""Clients that leave before the end: after a grace period without any reader, the request is cancelled.

A client may come back on another ingress (`/v1/requests/{id}/events`), so readers are counted in Redis: the
sorted set `{ns}:a:<request_id>` holds the ingresses that have one; the score is the end of the lease, in Unix
milliseconds by Redis's clock.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from serve_app.errors import JournalUnavailable, Reason
from serve_app.journal.client import reaching
from serve_app.journal.entries import Entry, RequestFacts, decode_facts, has_ended
from serve_app.journal.hub import Follower, FollowerHub
from serve_app.journal.store import JournalStore
from serve_app.logs import about
from serve_app.loops import Loops, ended
from serve_app.redis_clock import RedisClock
from serve_app.settings import Settings
from serve_app.telemetry import Telemetry

log = logging.getLogger("hermes.ingress")

_RENEW_S = 2.0
_LEASE_MS = 6_000
_RETRY_S = 0.5
_SLOW_S = 1.0
_MAY_COME_S = 10.0


class Departures:
    """Keeps the leases of this ingress's readers, and cancels what nobody reads any more."""

    def __init__(
        self, settings: Settings, redis: Redis, store: JournalStore, hub: FollowerHub, ingress_id: str,
        telemetry: Telemetry, clock: RedisClock, loops: Loops | None = None,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._redis = redis
        self._store = store
        self._hub = hub
        self._ingress_id = ingress_id
        self._telemetry = telemetry
        self._clock = clock
        self._loops = loops or Loops(telemetry)
        self._renewing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin to renew leases."""
        self._renewing = self._loops.keep("reader-leases", self._renew)

    async def stop(self) -> None:
        """Stop; requests whose client has left are then cancelled by their deadline at the latest."""
        if self._renewing is not None:
            await self._loops.end(self._renewing)
        await ended(list(self._tasks))

    async def arrived(self, request_id: str) -> None:
        """A reader has come back here: its lease must stand before the grace period elsewhere ends.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        pipeline = self._redis.pipeline(transaction=False)
        self._lease(pipeline, request_id)
        await reaching(lambda: pipeline.execute())

    def _lease(self, pipeline: Pipeline, request_id: str) -> None:
        key = self._key(request_id)
        pipeline.zadd(key, {self._ingress_id: self._clock.now_ms() + _LEASE_MS})
        pipeline.pexpire(key, 2 * _LEASE_MS)

    async def attach(self, request_id: str, seen: int, ended: bool = False) -> Follower:
        """Follow a request from event `seen` on, for a reader who has come back.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        try:
            if not ended:
                await self.arrived(request_id)
            return await self._hub.follow(request_id, seen)
        except BaseException:  # with its lease: who left before it relies on this reader
            if not ended:
                self._look_after(request_id)
            raise

    def unsure(self, follower: Follower) -> None:
        """Its client has left while it was being admitted, or Redis gave no answer, but may have it or get it yet."""
        self._hub.leave(follower)
        settling = self._look_after(follower.request_id, _MAY_COME_S)
        settling.add_done_callback(lambda _: follower.begun())

    def left(self, follower: Follower, departed: bool) -> None:
        """A reader is done (or has `departed` before the end)."""
        self._hub.leave(follower)
        if departed and follower.reader.ending is None:
            settling = self._look_after(follower.request_id)
            settling.add_done_callback(lambda _: follower.begun())
        else:
            follower.begun()

    def _look_after(self, request_id: str, may_come_s: float = 0.0) -> asyncio.Task[None]:
        task = asyncio.create_task(self._after_grace(request_id, may_come_s), name=f"departed-{request_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _key(self, request_id: str) -> str:
        return f"{self._settings.namespace}:a:{request_id}"

    async def _renew(self) -> None:
        """One command for each reader every two seconds; short requests never cost one."""
        while True:
            await asyncio.sleep(_RENEW_S)
            pipeline = self._redis.pipeline(transaction=False)
            for request_id in self._hub.request_ids:
                self._lease(pipeline, request_id)
            if len(pipeline):
                try:
                    await reaching(lambda pipeline=pipeline: pipeline.execute())  # type: ignore[misc]
                except JournalUnavailable as error:
                    log.debug("reader leases not renewed: %s", error)

    async def _after_grace(self, request_id: str, may_come_s: float) -> None:
        """Cancel a request that nobody reads. One that Redis does not know may still come, for so long."""
        pause_s = self._settings.ingress.disconnect_grace_s
        give_up_s = math.inf
        while True:
            await asyncio.sleep(pause_s)
            try:
                if await self._read_elsewhere(request_id):
                    return  # whoever reads it now looks after it when that reader leaves
                entries = await self._store.outline(request_id)
                give_up_s = min(give_up_s, time.monotonic() + may_come_s)  # from its first answer on
                if entries or time.monotonic() >= give_up_s:
                    await self._cancel(request_id, entries or [], ours=may_come_s > 0)
                    return
                pause_s = _RETRY_S
            except JournalUnavailable as error:
                log.debug("request %s: cannot cancel yet: %s", request_id, error)
                # Who reads it elsewhere must first have had the time to come back, and to renew its lease.
                pause_s = max(self._settings.ingress.disconnect_grace_s, 2 * _RENEW_S)

    async def _cancel(self, request_id: str, entries: list[Entry], ours: bool) -> None:
        if not entries or has_ended(entries):
            return
        if ours and decode_facts(entries[0], RequestFacts).wake != self._hub.channel:
            return  # of several with one key another was admitted, elsewhere
        if await self._store.end(request_id, "cancelled", Reason.CLIENT_DISCONNECTED, entries):
            self._telemetry.ended("", "cancelled", Reason.CLIENT_DISCONNECTED)
            extra = about(request_id, reason=Reason.CLIENT_DISCONNECTED)
            log.info("request %s ended: cancelled (client_disconnected)", request_id, extra=extra)

    async def _read_elsewhere(self, request_id: str) -> bool:
        """Whether somebody reads the request here or has a lease.

        Raises:
            JournalUnavailable: Redis cannot be reached, or was slow: then nobody could renew a lease.
        """
        if request_id in self._hub.request_ids:
            return True
        key, began_s = self._key(request_id), time.monotonic()
        await reaching(lambda: self._redis.zrem(key, self._ingress_id))
        readers: int = await reaching(lambda: self._redis.zcount(key, self._clock.now_ms(), "+inf"))
        if not readers and time.monotonic() - began_s > _SLOW_S:
            raise JournalUnavailable("Redis answers late")
        return readers > 0
