"""The ingress's side of the journal: one subscription for all its connections, and a follower for
each connection.

A wake-up carries the bytes of accepted entries, and may be lost at any time. A follower that misses
one notices a gap, a second of silence or a new subscription, and reads the stream instead.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from serve_app import timings
from serve_app.clock import SYSTEM
from serve_app.errors import RedisUnavailable
from serve_app.journal.follower import Follower
from serve_app.journal.ids import REQUEST_ID
from serve_app.journal.reader import JournalReader
from serve_app.journal.store import JournalStore
from serve_app.journal.wakes import decode_wakes
from serve_app.loops import Loops, jittered
from serve_app.observability.logs import Outage
from serve_app.redis.connection import Command, RespConnection, connect
from serve_app.redis.keyspace import wake_channel
from serve_app.redis.replies import answered
from serve_app.settings import Settings

log = logging.getLogger("hermes.journal")


class Followers:
    """Subscribes to this ingress's wake-up channel and hands entries to the followers."""

    def __init__(
        self,
        settings: Settings,
        store: JournalStore,
        ingress_id: str,
        loops: Loops | None = None,
    ) -> None:
        self.channel = wake_channel(settings.namespace, ingress_id)
        self._settings = settings
        self._store = store
        self._loops = loops or Loops()
        self._followers: dict[str, set[Follower]] = {}
        self._connection: RespConnection | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Subscribe (or keep trying) and start checking silent followers."""
        self._tasks = [
            self._loops.keep("followers-subscription", self._stay_subscribed),
            self._loops.keep("followers-silence", self._watch_silence),
        ]

    async def stop(self) -> None:
        await self._loops.end(*self._tasks)
        if self._connection is not None:
            self._connection.abort()

    @property
    def request_ids(self) -> list[str]:
        """Ids of the requests that are followed here."""
        return list(self._followers)

    def follow_new(self, request_id: str) -> Follower:
        """Follow a request that is about to be admitted here, whose first entry is known."""
        return self._add(request_id, JournalReader(position=REQUEST_ID))

    async def follow(self, request_id: str, seen: int) -> Follower:
        """Follow any request after event `seen`, and read its journal up to now.

        Raises:
            RedisUnavailable: Redis cannot be reached.
        """
        follower = self._add(request_id, JournalReader(seen=seen))
        try:
            await follower.catch_up()
        except BaseException:
            self.leave(follower)
            raise
        follower.wake()
        return follower

    def _add(self, request_id: str, reader: JournalReader) -> Follower:
        follower = Follower(self._store, request_id, reader)
        self._followers.setdefault(request_id, set()).add(follower)
        return follower

    def leave(self, follower: Follower) -> None:
        group = self._followers.get(follower.request_id)
        if group is not None:
            group.discard(follower)
            if not group:
                del self._followers[follower.request_id]

    def _on_message(self, _channel: bytes, payload: bytes) -> None:
        try:
            wakes = decode_wakes(payload)
        except (msgspec.DecodeError, ValueError) as error:
            log.error(
                "journal: dropping a malformed wake-up: %r", error
            )  # the check for silence finds its content
            return
        now_s = SYSTEM.monotonic_s()
        for request_id, entry in wakes:
            for follower in self._followers.get(request_id, ()):
                if follower.reader.full:  # its client does not read: leave it in the stream
                    follower.wake(stale=True)
                elif follower.reader.contiguous(entry):
                    follower.deliver(entry, now_s)
                elif entry.id > follower.reader.position:
                    follower.wake(stale=True)

    async def _stay_subscribed(self) -> None:
        outage = Outage(log, "journal: cannot subscribe, retrying")
        while True:
            try:
                lost = asyncio.Event()
                self._connection = await connect(self._settings.redis, self._on_message, lost.set)
                await self._ask(self._connection, ("SUBSCRIBE", self.channel))
                outage.over()
                for group in list(self._followers.values()):
                    for follower in group:
                        follower.wake(stale=True)
                await self._until_lost(self._connection, lost)
                log.warning("journal: subscription lost, subscribing again")
            except RedisUnavailable as error:
                outage.failed(error)
            await asyncio.sleep(jittered(timings.SUBSCRIPTION_RETRY_S))

    async def _until_lost(self, connection: RespConnection, lost: asyncio.Event) -> None:
        """Ping until the connection is lost: a connection that died silently (a node, a firewall's
        table) looks like an idle one.
        """
        while True:
            try:
                async with asyncio.timeout(jittered(timings.SUBSCRIPTION_PING_S)):
                    await lost.wait()
                    return
            except TimeoutError:
                await self._ask(connection, ("PING",))

    async def _ask(self, connection: RespConnection, command: Command) -> None:
        """Ping. Drops the connection and raises `RedisUnavailable` if no answer or an error
        comes.
        """
        try:
            (reply,) = await connection.ask([command], timings.SUBSCRIPTION_ANSWER_S)
            answered(reply, what=str(command[0]))
        except RedisUnavailable:
            connection.abort()
            raise

    async def _watch_silence(self) -> None:
        """Read the journals of silent followers, many per round trip, because thousands may wait in
        the queue.
        """
        while True:
            foreign = {
                f for group in self._followers.values() for f in group if self._is_foreign(f)
            }
            await asyncio.sleep(_silence_s(bool(foreign)) / 2)
            now = SYSTEM.monotonic_s()
            silent = [
                f
                for group in self._followers.values()
                for f in group
                if f.fed_at < now - _silence_s(f in foreign) and not f.reader.full
            ]
            for start in range(0, len(silent), timings.FOLLOWERS_A_LOOK):
                try:
                    await self._look_at(silent[start : start + timings.FOLLOWERS_A_LOOK])
                except RedisUnavailable as error:
                    log.debug("journal: cannot check silent followers: %s", error)
                    break

    def _is_foreign(self, follower: Follower) -> bool:
        """Whether the wake-ups go to another ingress, the one that admitted the request."""
        facts = follower.reader.facts
        return facts is not None and facts.wake != self.channel

    async def _look_at(self, followers: list[Follower]) -> None:
        wanted = [(follower.request_id, follower.reader.position) for follower in followers]
        for follower, entries in zip(
            followers, await self._store.read_many(wanted, timings.ENTRIES_A_LOOK), strict=True
        ):
            follower.fed_at = SYSTEM.monotonic_s()
            follower.feed(entries, timings.ENTRIES_A_LOOK)
            follower.wake()  # even without news: its connection may need a heartbeat


def _silence_s(foreign: bool) -> float:
    return timings.FOLLOWER_FOREIGN_S if foreign else timings.FOLLOWER_SILENCE_S
