"""The ingress's side of the journal: one subscription for all its connections, a follower for each.

A wake-up carries the bytes of accepted entries. It may be lost at any time; a follower that misses one sees a
gap, a silence of a second or a new subscription, and reads the stream instead.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import zlib
from collections.abc import Callable

import msgspec

from serve_app.errors import JournalUnavailable, Reason
from serve_app.journal.bulk import PAGE_ENTRIES, BulkReads
from serve_app.journal.connection import Command, RespConnection, connect
from serve_app.journal.entries import REQUEST_ID, Entry, decode_wakes, wake_channel
from serve_app.journal.reader import Ending, JournalReader
from serve_app.journal.store import JournalStore
from serve_app.logs import Outage
from serve_app.loops import Loops, jittered
from serve_app.settings import Settings

log = logging.getLogger("hermes.journal")

SILENCE_S = 1.0
_FOREIGN_S = 0.1
_LOOK_AT = 500
_LOOK_AT_ENTRIES = 64
_RECONNECT_S = 0.1
_PING_S = 1.5
_ANSWER_S = 2.5


class Follower:
    """Reads one journal for one connection."""

    __slots__ = ("_bulk", "_woken", "due_at", "fed_at", "on_begun", "reader", "request_id", "stale")

    def __init__(self, bulk: BulkReads, request_id: str, reader: JournalReader) -> None:
        self.request_id = request_id
        self.reader = reader
        self.stale = False
        self.fed_at = math.inf  # not silent before somebody waits: the journal may be about to be made
        self.due_at: float | None = None
        """When somebody waits no longer for an answer of Redis, by the event loop's clock."""
        self.on_begun: Callable[[], None] | None = None
        """Called once, when somebody works on the request, or nobody will."""
        self._bulk = bulk
        self._woken = asyncio.Event()

    def wake(self, stale: bool = False) -> None:
        """There is something new in the reader, or (`stale`) perhaps in the stream."""
        self.stale = self.stale or stale
        self._woken.set()

    def begun(self) -> None:
        """The request no longer waits, or nobody is left to see it."""
        if self.on_begun is not None:
            on_begun, self.on_begun = self.on_begun, None
            on_begun()

    async def wait(self) -> None:
        """Until the reader may hold something new. A Redis that is away only makes it take longer."""
        self.fed_at = min(self.fed_at, time.monotonic())
        await self._woken.wait()
        self._woken.clear()
        self.fed_at = time.monotonic()
        if self.on_begun is not None and (self.reader.attempt is not None or self.reader.ending is not None):
            self.begun()
        if self.stale and self.reader.ending is None:
            self.stale = False
            try:
                async with asyncio.timeout_at(self.due_at):
                    await self.catch_up()
            except (JournalUnavailable, TimeoutError):
                self.stale = True  # the hub's next look wakes it again

    async def catch_up(self) -> None:
        """Read the stream from the position on: a page of it, and the next when that has been taken.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        self.feed(await self._bulk.page(self.request_id, self.reader.position), PAGE_ENTRIES)

    def feed(self, entries: list[Entry] | None, at_most: int = 0) -> None:
        """What a wake-up, or a read of `at_most` entries of the stream has brought; None: the journal is gone."""
        if at_most and entries is not None and len(entries) == at_most:
            self.wake(stale=True)
        if entries is None:
            self.reader.ending = self.reader.ending or Ending("failed", "journal_lost", None)
        try:
            for entry in entries or ():
                self.reader.feed(entry)
        except (msgspec.DecodeError, LookupError, ValueError, zlib.error) as error:
            log.error("request %s has a journal that cannot be read: %r", self.request_id, error)
            self.reader.ending = Ending("failed", Reason.JOURNAL_LOST, None)


class FollowerHub:
    """Subscribes to this ingress's wake-up channel and hands entries to the followers."""

    def __init__(self, settings: Settings, store: JournalStore, ingress_id: str, loops: Loops | None = None) -> None:
        self.channel = wake_channel(settings.namespace, ingress_id)
        self._settings = settings
        self._store = store
        self._loops = loops or Loops()
        self._bulk = BulkReads(settings)
        self._followers: dict[str, set[Follower]] = {}
        self._connection: RespConnection | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Subscribe (or go on trying) and begin to look after silent followers."""
        self._tasks = [
            self._loops.keep("hub-subscription", self._stay_subscribed),
            self._loops.keep("hub-silence", self._watch_silence),
        ]

    async def stop(self) -> None:
        """Drop the subscription."""
        await self._loops.end(*self._tasks)
        await self._bulk.close()
        if self._connection is not None:
            self._connection.abort()

    @property
    def request_ids(self) -> list[str]:
        """Requests that somebody follows here."""
        return list(self._followers)

    def follow_new(self, request_id: str) -> Follower:
        """Follow a request that is about to be admitted here (its first entry is known)."""
        return self._add(request_id, JournalReader(position=REQUEST_ID))

    async def follow(self, request_id: str, seen: int) -> Follower:
        """Follow any request from event `seen` on, read up to now.

        Raises:
            JournalUnavailable: Redis cannot be reached.
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
        follower = Follower(self._bulk, request_id, reader)
        self._followers.setdefault(request_id, set()).add(follower)
        return follower

    def leave(self, follower: Follower) -> None:
        """The connection is gone or done."""
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
                "journal: a wake-up that nobody can read is dropped: %r", error
            )  # the silence brings what it said
            return
        for request_id, entry in wakes:
            for follower in self._followers.get(request_id, ()):
                if follower.reader.full:  # its client takes nothing: it stays in the stream
                    follower.wake(stale=True)
                elif follower.reader.contiguous(entry):
                    follower.feed([entry])
                    follower.wake()
                elif entry.id > follower.reader.position:
                    follower.wake(stale=True)

    async def _stay_subscribed(self) -> None:
        outage = Outage(log, "journal: cannot subscribe, trying on")
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
            except JournalUnavailable as error:
                outage.failed(error)
            await asyncio.sleep(jittered(_RECONNECT_S))

    async def _until_lost(self, connection: RespConnection, lost: asyncio.Event) -> None:
        """A connection that has died without a word (a node, a firewall's table) looks like one that has no news."""
        while True:
            try:
                async with asyncio.timeout(jittered(_PING_S)):
                    await lost.wait()
                    return
            except TimeoutError:
                await self._ask(connection, ("PING",))

    async def _ask(self, connection: RespConnection, command: Command) -> None:
        """Raises `JournalUnavailable`, the connection dropped, where no answer comes in time, or a refusal."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                (reply,) = await connection.call([command])
        except TimeoutError:
            connection.abort()
            raise JournalUnavailable(f"no answer to {command[0]} in {_ANSWER_S:g} s") from None
        if isinstance(reply, Exception):
            connection.abort()
            raise JournalUnavailable(f"{command[0]}: {reply}")

    async def _watch_silence(self) -> None:
        """Look into the journals of silent followers, many in one round trip; thousands may wait in the queue."""
        while True:
            foreign = {f for group in self._followers.values() for f in group if self._is_foreign(f)}
            await asyncio.sleep(_FOREIGN_S / 2 if foreign else SILENCE_S / 2)
            now = time.monotonic()
            silent = [
                f
                for group in self._followers.values()
                for f in group
                if f.fed_at < now - (_FOREIGN_S if f in foreign else SILENCE_S) and not f.reader.full
            ]
            for start in range(0, len(silent), _LOOK_AT):
                try:
                    await self._look_at(silent[start : start + _LOOK_AT])
                except JournalUnavailable as error:
                    log.debug("journal: silent followers not looked after: %s", error)
                    break

    def _is_foreign(self, follower: Follower) -> bool:
        """Whether the wake-ups go to another ingress: where the request was admitted."""
        facts = follower.reader.facts
        return facts is not None and facts.wake != self.channel

    async def _look_at(self, followers: list[Follower]) -> None:
        wanted = [(follower.request_id, follower.reader.position) for follower in followers]
        for follower, entries in zip(followers, await self._store.read_many(wanted, _LOOK_AT_ENTRIES), strict=True):
            follower.fed_at = time.monotonic()
            follower.feed(entries, _LOOK_AT_ENTRIES)
            follower.wake()  # also for nothing: its connection may be due a heartbeat
