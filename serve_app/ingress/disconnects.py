"""Cancels a request if its clients have left: after a grace period without any reader.

A client may reconnect to another ingress (`/v1/requests/{id}/events`), so readers are known in
Redis: the sorted set `{ns}:a:<request_id>` holds the ingresses that have a reader. The score is the
end of this entry in Unix milliseconds by Redis's clock. It counts while its ingress lives, which
that ingress's own lease says, so it is written once, and again only for very long requests.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from serve_app import timings
from serve_app.cluster.members import Members
from serve_app.contract import Reason
from serve_app.errors import RedisUnavailable
from serve_app.foundation import Foundation
from serve_app.ingress.followers import Follower, Followers
from serve_app.journal.entries import RequestFacts
from serve_app.loops import ended
from serve_app.redis.connection import Command
from serve_app.redis.keyspace import readers_key
from serve_app.redis.replies import all_answered
from serve_app.requests.endings import Endings
from serve_app.requests.lifecycle import not_joined

log = logging.getLogger("hermes.ingress")


@dataclass(eq=False)
class Disconnects:
    """Writes down what is read at this ingress, and cancels requests that have no reader left."""

    base: Foundation
    followers: Followers
    ingress_id: str
    members: Callable[[], Members]
    endings: Endings
    arriving: Counter[str] = field(default_factory=Counter)
    """Requests whose clients are coming back here, and are not followed yet."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """What looks after requests whose client has left."""
    _written: dict[str, float] = field(default_factory=dict)
    """Requests whose reader here is written down, and until when that holds, in monotonic seconds.
    """
    _unsure: dict[str, tuple[asyncio.Task[None], RequestFacts]] = field(default_factory=dict)
    """By request: what looks after one that may have been accepted, and what was submitted."""

    async def start(self) -> None:
        self.base.loops.keep("reader-leases", self._renew)

    async def stop(self) -> None:
        """Stop. Requests whose client has left then run at most until their deadline."""
        await ended(list(self.tasks))

    async def arrived(self, request_id: str) -> None:
        """A client has reconnected here, which must be known before the grace period ends
        elsewhere. Raises `RedisUnavailable`.
        """
        all_answered(await self.base.link.call(self._writing(request_id)))

    def _writing(self, request_id: str) -> list[Command]:
        key = readers_key(self.base.settings.namespace, request_id)
        until_ms = self.base.clock.now_ms() + timings.READER_KNOWN_MS
        return [
            ("ZADD", key, until_ms, self.ingress_id),
            ("PEXPIRE", key, timings.READER_KNOWN_MS),
        ]

    async def attach(self, request_id: str, seen: int, ended: bool = False) -> Follower:
        """Follow a request after event `seen`, for a client that has reconnected. Raises
        `RedisUnavailable`.
        """
        doubt, submitted = self._unsure.pop(request_id, (None, None))
        if doubt is not None:
            doubt.cancel()  # the request is there, and now somebody is told so
        self.arriving[request_id] += 1
        try:
            if not ended:
                await self.arrived(request_id)
            return await self.followers.follow(request_id, seen)
        except BaseException:  # earlier readers relied on this one
            if not ended:
                self._look_after(request_id, submitted)
            raise
        finally:
            self.arriving[request_id] -= 1
            self.arriving += Counter()  # without those at zero

    def unsure(self, request_id: str, facts: RequestFacts, settled: Callable[[], None]) -> None:
        """Redis may have accepted a request, or may still do so, although its client left or got a
        503. Cancel the request unless somebody reads it, and call `settled` when that is done.
        """
        settling = self._look_after(request_id, facts)
        mine = self._unsure[request_id] = (settling, facts)

        def over(_: object) -> None:
            if self._unsure.get(request_id) is mine:
                del self._unsure[request_id]
            settled()

        settling.add_done_callback(over)

    def left(
        self, follower: Follower, departed: bool, facts: RequestFacts | None = None
    ) -> asyncio.Task[None] | None:
        """A reader has finished (or, if `departed`, has left before the end). Returns what runs
        until it is settled whether the request goes on, if anything does.
        """
        self.followers.leave(follower)
        if departed and follower.reader.ending is None:
            return self._look_after(follower.request_id, left=facts)
        return None

    def _look_after(
        self,
        request_id: str,
        unsure: RequestFacts | None = None,
        left: RequestFacts | None = None,
    ) -> asyncio.Task[None]:
        after_grace = self._after_grace(request_id, unsure, left)
        task = asyncio.create_task(after_grace, name=f"departed-{request_id}")
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def _renew(self) -> None:
        """Write down the new readers every two seconds; short requests never cost a command."""
        while True:
            await asyncio.sleep(timings.READER_RENEW_S)
            now_s, read = self.base.clock.local.monotonic_s(), self.followers.request_ids
            self._written = {name: self._written.get(name, 0.0) for name in read}
            due = [name for name, until_s in self._written.items() if until_s <= now_s]
            try:
                for start in range(0, len(due), timings.FOLLOWERS_A_LOOK):
                    some = due[start : start + timings.FOLLOWERS_A_LOOK]
                    commands = [command for name in some for command in self._writing(name)]
                    all_answered(await self.base.link.call(commands))
                    until_s = now_s + timings.READER_KNOWN_MS / 2000
                    self._written.update(dict.fromkeys(some, until_s))
            except RedisUnavailable as error:
                log.debug("cannot write down who reads: %s", error)

    async def _after_grace(
        self, request_id: str, unsure: RequestFacts | None, left: RequestFacts | None
    ) -> None:
        """Cancel a request that nobody reads. `unsure`: what was submitted, if Redis may still
        accept it: then wait in case it arrives. `left`: of which a client has left for good.
        """
        if left and left.twins:  # even if this ingress dies before it cancels the request
            with suppress(RedisUnavailable):
                await self.base.link.call([not_joined(self.base.settings, request_id, left)])
        may_come_s = timings.ADMISSION_MAY_COME_S if unsure else 0.0
        pause_s = self.base.settings.ingress.disconnect_grace_s
        give_up_s = math.inf
        while True:
            await asyncio.sleep(pause_s)
            try:
                record = await self.base.store.record(request_id)
                if await self._is_read(request_id):  # asked last: clients come back until the end
                    return  # the current reader starts its own grace period when it leaves
                now_s = self.base.clock.local.monotonic_s()
                give_up_s = min(give_up_s, now_s + may_come_s)  # from Redis's first answer
                if record is None and now_s < give_up_s:
                    pause_s = timings.CANCEL_RETRY_S
                    continue
                if record and not record.ended and _is_its_clients(record.facts, unsure):
                    await self.endings.end(request_id, Reason.CLIENT_DISCONNECTED, record)
                return
            except RedisUnavailable as error:
                log.debug("request %s: cannot cancel yet: %s", request_id, error)
                # A reader elsewhere must first have had time to reconnect and to be written down.
                pause_s = max(
                    self.base.settings.ingress.disconnect_grace_s, 2 * timings.READER_RENEW_S
                )

    def _is_read_here(self, request_id: str) -> bool:
        return request_id in self.arriving or request_id in self.followers.request_ids

    async def _is_read(self, request_id: str) -> bool:
        """Whether somebody reads the request here or at another ingress that lives.
        `RedisUnavailable`, also if Redis was so slow that it may not know all readers, or which
        ingresses live.
        """
        if self._is_read_here(request_id):
            return True
        key = readers_key(self.base.settings.namespace, request_id)
        began_s, known = self.base.clock.local.monotonic_s(), (self.base.clock.now_ms(), "+inf")
        asked = [("ZREM", key, self.ingress_id), ("ZRANGEBYSCORE", key, *known)]
        _, readers = all_answered(await self.base.link.call(asked))
        self._written.pop(request_id, None)
        if self._is_read_here(request_id):  # since
            return True
        members = self.members()
        if any(name.encode() in readers for name in members.living):
            return True
        if readers and not members.trusted:
            raise RedisUnavailable("who lives is not certain")
        if self.base.clock.local.monotonic_s() - began_s > timings.READER_SLOW_S:
            raise RedisUnavailable("Redis answers late")
        return False


def _is_its_clients(facts: RequestFacts | None, unsure: RequestFacts | None) -> bool:
    """Whether a request ends with its client. If it is unsure what was accepted, it may be another
    request with the same idempotency key.
    """
    return facts == unsure if unsure is not None else facts is None or not facts.detached
