"""Cancels a request if its clients have left: after a grace period without any reader.

A client may reconnect to another ingress (`/v1/requests/{id}/events`), so readers are counted in
Redis: the sorted set `{ns}:a:<request_id>` holds the ingresses that have a reader. The score is the
end of the lease in Unix milliseconds by Redis's clock.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from serve_app import timings
from serve_app.clock import RedisClock
from serve_app.contract import Reason, State
from serve_app.endings import Endings
from serve_app.errors import RedisUnavailable
from serve_app.journal.entries import Entry, decode_facts, has_ended
from serve_app.journal.facts import RequestFacts
from serve_app.journal.follower import Follower
from serve_app.journal.followers import Followers
from serve_app.journal.store import JournalStore
from serve_app.loops import Loops, ended
from serve_app.redis.client import redis_call
from serve_app.redis.keyspace import readers_key
from serve_app.settings import Settings

log = logging.getLogger("hermes.ingress")


class Disconnects:
    """Keeps the leases of this ingress's readers, and cancels requests that have no reader left."""

    def __init__(
        self,
        settings: Settings,
        redis: Redis,
        store: JournalStore,
        followers: Followers,
        ingress_id: str,
        endings: Endings,
        clock: RedisClock,
        loops: Loops | None = None,
    ) -> None:
        self._settings = settings
        self._redis = redis
        self._store = store
        self._followers = followers
        self._ingress_id = ingress_id
        self._endings = endings
        self._clock = clock
        self._loops = loops or Loops()
        self._renewing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start renewing leases."""
        self._renewing = self._loops.keep("reader-leases", self._renew)

    async def stop(self) -> None:
        """Stop. Requests whose client has left then run at most until their deadline."""
        if self._renewing is not None:
            await self._loops.end(self._renewing)
        await ended(list(self._tasks))

    async def arrived(self, request_id: str) -> None:
        """A client has reconnected here; its lease must be written before the grace period ends
        elsewhere.

        Raises:
            RedisUnavailable: Redis cannot be reached.
        """
        pipeline = self._redis.pipeline(transaction=False)
        self._lease(pipeline, request_id)
        await redis_call(lambda: pipeline.execute())

    def _lease(self, pipeline: Pipeline, request_id: str) -> None:
        key = self._key(request_id)
        pipeline.zadd(key, {self._ingress_id: self._clock.now_ms() + timings.READER_LEASE_MS})
        pipeline.pexpire(key, 2 * timings.READER_LEASE_MS)

    async def attach(self, request_id: str, seen: int, ended: bool = False) -> Follower:
        """Follow a request after event `seen`, for a client that has reconnected.

        Raises:
            RedisUnavailable: Redis cannot be reached.
        """
        try:
            if not ended:
                await self.arrived(request_id)
            return await self._followers.follow(request_id, seen)
        except BaseException:  # earlier readers relied on this one
            if not ended:
                self._look_after(request_id)
            raise

    def unsure(self, request_id: str, facts: RequestFacts, settled: Callable[[], None]) -> None:
        """Redis may have accepted a request, or may still do so, although its client left or got a
        503. Cancel the request unless somebody reads it, and call `settled` when that is done.
        """
        settling = self._look_after(request_id, facts)
        settling.add_done_callback(lambda _: settled())

    def left(self, follower: Follower, departed: bool) -> None:
        """A reader has finished (or, if `departed`, has left before the end)."""
        self._followers.leave(follower)
        if departed and follower.reader.ending is None:
            settling = self._look_after(follower.request_id)
            settling.add_done_callback(lambda _: follower.begun())
        else:
            follower.begun()

    def _look_after(
        self, request_id: str, unsure: RequestFacts | None = None
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(
            self._after_grace(request_id, unsure), name=f"departed-{request_id}"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _key(self, request_id: str) -> str:
        return readers_key(self._settings.namespace, request_id)

    async def _renew(self) -> None:
        """Renew all leases every two seconds, with one command per reader; short requests never
        cost one.
        """
        while True:
            await asyncio.sleep(timings.READER_RENEW_S)
            pipeline = self._redis.pipeline(transaction=False)
            for request_id in self._followers.request_ids:
                self._lease(pipeline, request_id)
            if len(pipeline):
                try:
                    await redis_call(lambda pipeline=pipeline: pipeline.execute())  # type: ignore[misc]
                except RedisUnavailable as error:
                    log.debug("cannot renew the readers' leases: %s", error)

    async def _after_grace(self, request_id: str, unsure: RequestFacts | None) -> None:
        """Cancel a request that nobody reads.

        Args:
            unsure: what was submitted, if Redis may still accept it: then wait in case it arrives.
        """
        may_come_s = timings.ADMISSION_MAY_COME_S if unsure else 0.0
        pause_s = self._settings.ingress.disconnect_grace_s
        give_up_s = math.inf
        while True:
            await asyncio.sleep(pause_s)
            try:
                if await self._read_elsewhere(request_id):
                    return  # the current reader starts its own grace period when it leaves
                entries = await self._store.outline(request_id)
                give_up_s = min(
                    give_up_s, self._clock.local.monotonic_s() + may_come_s
                )  # counted from Redis's first answer
                if entries or self._clock.local.monotonic_s() >= give_up_s:
                    await self._cancel(request_id, entries or [], unsure)
                    return
                pause_s = timings.CANCEL_RETRY_S
            except RedisUnavailable as error:
                log.debug("request %s: cannot cancel yet: %s", request_id, error)
                # A reader elsewhere must first have had time to reconnect and to renew its
                # lease.
                pause_s = max(self._settings.ingress.disconnect_grace_s, 2 * timings.READER_RENEW_S)

    async def _cancel(
        self, request_id: str, entries: list[Entry], unsure: RequestFacts | None
    ) -> None:
        if not entries or has_ended(entries):
            return
        if unsure is not None and decode_facts(entries[0], RequestFacts) != unsure:
            return  # another request with the same idempotency key was accepted
        if unsure is None and decode_facts(entries[0], RequestFacts).detached:
            return
        await self._endings.end(request_id, State.CANCELLED, Reason.CLIENT_DISCONNECTED, entries)

    async def _read_elsewhere(self, request_id: str) -> bool:
        """Whether somebody reads the request here or holds a lease.

        Raises:
            RedisUnavailable: Redis cannot be reached, or was so slow that leases may not have been
                renewed.
        """
        if request_id in self._followers.request_ids:
            return True
        key, began_s = self._key(request_id), self._clock.local.monotonic_s()
        await redis_call(lambda: self._redis.zrem(key, self._ingress_id))
        readers: int = await redis_call(
            lambda: self._redis.zcount(key, self._clock.now_ms(), "+inf")
        )
        if not readers and self._clock.local.monotonic_s() - began_s > timings.READER_SLOW_S:
            raise RedisUnavailable("Redis answers late")
        return readers > 0
