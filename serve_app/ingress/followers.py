"""The ingress's side of the journal: one subscription for all its connections, and a follower for
each connection.

A wake-up carries the bytes of accepted entries, and may be lost at any time. A follower that misses
one notices a gap, a second of silence or a new subscription, and reads the stream instead.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter

from serve_app import timings
from serve_app.clock import SYSTEM
from serve_app.contract import Reason, State
from serve_app.errors import RedisUnavailable, Unreadable
from serve_app.journal.entries import REQUEST_ID, Entry, EntryId, decode_wakes, entry_from_redis
from serve_app.journal.reader import Ending, JournalReader
from serve_app.loops import Loops, jittered
from serve_app.observability.logs import Outage
from serve_app.redis.connection import Command, RespConnection, connect
from serve_app.redis.keyspace import wake_channel
from serve_app.redis.replies import Reply, answered
from serve_app.requests.store import JournalStore
from serve_app.settings import Settings

log = logging.getLogger("hermes.journal")

_LOST = Ending(State.FAILED, Reason.JOURNAL_LOST, None)


class Follower:
    """Follows one journal for one connection: with wake-ups, and with the stream if a wake-up was
    missed.

    New bytes go straight to the client (`push`) while the connection's task only waits for them: a
    task switch for every token would cost more than the send. Everything else wakes the task.
    """

    def __init__(self, store: JournalStore, request_id: str, reader: JournalReader) -> None:
        self.request_id = request_id
        self.reader = reader
        self.stale = False
        # Silence counts only once somebody waits, because the journal may not exist yet.
        self.fed_at = math.inf
        self.due_at: float | None = None
        """When to stop waiting for an answer from Redis, by the event loop's clock."""
        self.push: Callable[[bytes], bool] | None = None
        """Sends bytes outside of the connection's task; False if that task must."""
        self.pushed_at = 0.0
        """When it last did, in monotonic seconds."""
        self._store = store
        self._page = timings.FIRST_PAGE_ENTRIES
        self._idle = False
        self._woken = asyncio.Event()

    def wake(self, stale: bool = False) -> None:
        """The reader has something new or, if `stale`, the stream may have."""
        self.stale = self.stale or stale
        self._woken.set()

    def deliver(self, entry: Entry, now_s: float) -> None:
        """An entry of a wake-up (hot path)."""
        reader = self.reader
        waits = self._idle and not self._woken.is_set()
        if waits and self.push is not None and reader.pass_on(entry, self.push):
            self.fed_at = self.pushed_at = now_s
        elif reader.full:  # its client does not read: leave it in the stream
            self.wake(stale=True)
        elif reader.contiguous(entry):
            self.feed([entry])
            self._woken.set()
        elif entry.id > reader.position:
            self.wake(stale=True)

    async def wait(self) -> None:
        """Wait until the reader may hold something new. If Redis is unreachable, this only takes
        longer.
        """
        self.fed_at = min(self.fed_at, SYSTEM.monotonic_s())
        self._idle = True
        try:
            await self._woken.wait()
        finally:
            self._idle = False
        self._woken.clear()
        self.fed_at = SYSTEM.monotonic_s()
        if self.stale and self.reader.ending is None:
            self.stale = False
            try:
                async with asyncio.timeout_at(self.due_at):
                    await self.catch_up()
            except (RedisUnavailable, TimeoutError):
                self.stale = True  # the next check for silence wakes it again

    async def catch_up(self) -> None:
        """Read one page of the stream after the current position; the next page follows when this
        one has been consumed. Raises `RedisUnavailable`.
        """
        wanted, at_most = [(self.request_id, self.reader.position)], self._page
        (entries,) = await self._store.read_many(wanted, at_most)
        self.feed(entries, at_most)
        size = sum(len(entry.body) + len(entry.outputs or b"") for entry in entries or ())
        if size > timings.PAGE_BYTES:
            self._page = max(1, self._page // 4)
        elif size < timings.PAGE_BYTES // 2:
            self._page = min(timings.PAGE_ENTRIES, self._page * 2)

    def feed(self, entries: list[Entry] | None, at_most: int = 0) -> None:
        """Pass on entries from a wake-up, or from a read of `at_most` entries of the stream; None:
        the journal is gone.
        """
        if at_most and entries is not None and len(entries) == at_most:
            self.wake(stale=True)
        if entries is None:
            self.reader.ending = self.reader.ending or _LOST
        try:
            for entry in entries or ():
                self.reader.feed(entry)
        except Unreadable as error:
            log.error("request %s has a journal that cannot be read: %r", self.request_id, error)
            self.reader.ending = _LOST
        except Exception:  # a defect of ours ends this reader alone, and the request goes on
            log.exception("request %s: its reader fails", self.request_id)
            self.reader.ending = Ending(State.FAILED, Reason.INTERNAL, None)


class Followers:
    """Subscribes to this ingress's wake-up channel and hands entries to the followers."""

    def __init__(
        self, settings: Settings, store: JournalStore, ingress_id: str, loops: Loops | None = None
    ) -> None:
        self.channel = wake_channel(settings.namespace, ingress_id)
        self._settings = settings
        self._store = store
        self._loops = loops or Loops()
        self._followers: dict[str, set[Follower]] = {}
        self.on_end: Callable[[str], None] = lambda _: None
        """Told of a request that has ended from outside, which this ingress follows or has claimed.
        A hint: it may be lost."""
        self._connection: RespConnection | None = None
        self._blocked: RespConnection | None = None
        """Waits for news of foreign journals."""
        self._newcomer = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Subscribe (or keep trying) and start looking after those that get no wake-ups."""
        self._tasks = [
            self._loops.keep("followers-subscription", self._stay_subscribed),
            self._loops.keep("followers-silence", self._watch_silence),
            self._loops.keep("followers-foreign", self._watch_foreign),
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
        """Follow a request that was just admitted here, whose first entry is known."""
        return self._add(request_id, JournalReader(position=REQUEST_ID))

    async def follow(self, request_id: str, seen: int) -> Follower:
        """Follow any request after event `seen`, and read its journal up to now. Raises
        `RedisUnavailable`.
        """
        follower = self._add(request_id, JournalReader(seen=seen))
        try:
            await follower.catch_up()
        except BaseException:
            self.leave(follower)
            raise
        follower.wake()
        if follower in self._foreign():
            self._newcomer.set()
            if self._blocked is not None:
                self._blocked.abort()  # it waits for news of others alone
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

    def on_message(self, payload: bytes) -> None:
        """A message of wake-ups, published or over a worker's connection."""
        try:
            wakes = decode_wakes(payload)
        except Unreadable as error:  # the check for silence finds its content
            log.error("journal: dropping a malformed wake-up: %r", error)
            return
        now_s = SYSTEM.monotonic_s()
        for request_id, entry in wakes:
            if entry.terminal and not entry.counts:
                self.on_end(request_id)
            for follower in self._followers.get(request_id, ()):
                follower.deliver(entry, now_s)

    # -- wake-ups ---------------------------------------------------------------------------------

    async def _stay_subscribed(self) -> None:
        outage = Outage(log, "journal: cannot subscribe, retrying")
        while True:
            try:
                lost = asyncio.Event()
                self._connection = await connect(
                    self._settings.redis, lambda _, payload: self.on_message(payload), lost.set
                )
                await self._ask(self._connection, ("SUBSCRIBE", self.channel))
                outage.over()
                for follower in self._all():
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

    async def _ask(
        self, connection: RespConnection, command: Command, waits_s: float = 0.0
    ) -> Reply:
        """The reply to a command that may wait so long in Redis. Drops the connection and raises
        `RedisUnavailable` if none or an error comes.
        """
        try:
            within_s = waits_s + timings.SUBSCRIPTION_ANSWER_S
            (reply,) = await connection.ask([command], within_s)
            return answered(reply, what=str(command[0]))
        except RedisUnavailable:
            connection.abort()
            raise

    # -- requests that another ingress has admitted -----------------------------------------------

    async def _watch_foreign(self) -> None:
        """Wait for news of all foreign journals in one blocking read, because their ingress may
        have died. A pause bounds how many journals are looked at in a second.
        """
        outage = Outage(log, "journal: cannot read other ingresses' requests, retrying")
        connection: RespConnection | None = None
        try:
            while True:
                self._newcomer.clear()
                if not self._foreign():
                    await self._newcomer.wait()
                try:
                    if connection is None or not connection.usable:
                        connection = await connect(self._settings.redis)
                    looks = await self._read_foreign(connection)
                    outage.over()
                    await asyncio.sleep(looks / timings.FOLLOWER_LOOKS_A_S)
                except RedisUnavailable as error:
                    if not self._newcomer.is_set():
                        outage.failed(error)
                        await asyncio.sleep(jittered(timings.SUBSCRIPTION_RETRY_S))
        finally:
            if connection is not None:
                connection.abort()

    async def _read_foreign(self, connection: RespConnection) -> int:
        """Wait until a foreign journal has news. Returns how many were looked at."""
        positions = dict[str, EntryId]()
        for follower in self._foreign():
            name, after = follower.request_id, follower.reader.position
            if follower.reader.full:  # it reads pages as soon as its client takes what it has
                follower.wake(stale=True)
            else:
                positions[name] = min(positions.get(name, after), after)
        block_s = timings.FOREIGN_BLOCK_S
        if not positions:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._newcomer.wait(), block_s)
            return 0
        keys = {self._store.key(name).encode(): name for name in positions}
        page = ("COUNT", timings.ENTRIES_A_LOOK, "BLOCK", int(block_s * 1000))
        command = ("XREAD", *page, "STREAMS", *keys, *map(str, positions.values()))
        self._blocked = connection
        try:
            found = await self._ask(connection, command, block_s)
        finally:
            self._blocked = None
        for key, items in found or ():
            try:
                entries = [entry_from_redis(item) for item in items]
            except Unreadable as error:
                log.error("request %s has a journal that cannot be read: %r", keys[key], error)
                entries = None
            for follower in self._followers.get(keys[key], ()):
                if not follower.reader.full:
                    self._hand_on(follower, entries)
        return len(positions)

    def _foreign(self) -> list[Follower]:
        """The followers whose wake-ups go to another ingress, the one that admitted the request."""
        return [
            follower
            for follower in self._all()
            if (facts := follower.reader.facts) is not None
            and facts.wake_channel != self.channel
            and follower.reader.ending is None
        ]

    # -- silence ----------------------------------------------------------------------------------

    async def _watch_silence(self) -> None:
        """Read the journals of silent followers, many per round trip, because thousands may wait in
        the queue, or their wake-ups may be lost.
        """
        pause_s = timings.FOLLOWER_SILENCE_S / 2
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self._look(int(pause_s * timings.FOLLOWER_LOOKS_A_S))
            except RedisUnavailable as error:
                log.debug("journal: cannot check silent followers: %s", error)
                for follower in self._silent():  # their clients need signs of life all the same
                    follower.wake()

    async def _look(self, at_most: int) -> None:
        """Read the journals of so many followers that have been silent for too long, of those first
        for which it is most overdue.
        """
        chosen = heapq.nsmallest(at_most, self._silent(), key=attrgetter("fed_at"))
        for start in range(0, len(chosen), timings.FOLLOWERS_A_LOOK):
            await self._look_at(chosen[start : start + timings.FOLLOWERS_A_LOOK])

    def _silent(self) -> list[Follower]:
        since_s = SYSTEM.monotonic_s() - timings.FOLLOWER_SILENCE_S
        return [one for one in self._all() if one.fed_at < since_s and not one.reader.full]

    def _all(self) -> list[Follower]:
        return [follower for group in self._followers.values() for follower in group]

    async def _look_at(self, followers: list[Follower]) -> None:
        wanted = [(follower.request_id, follower.reader.position) for follower in followers]
        found = await self._store.read_many(wanted, timings.ENTRIES_A_LOOK)
        for follower, entries in zip(followers, found, strict=True):
            self._hand_on(follower, entries)

    def _hand_on(self, follower: Follower, entries: list[Entry] | None) -> None:
        """What was read of its journal. It wakes even without news: its connection may need a
        heartbeat.
        """
        follower.fed_at = SYSTEM.monotonic_s()
        follower.feed(entries, timings.ENTRIES_A_LOOK)
        follower.wake()
