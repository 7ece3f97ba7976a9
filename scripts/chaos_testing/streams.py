"""Streams without Ray: a worker's writer and an ingress's subscription in this process, on a real
Redis. Each stream produces an event every few milliseconds until it is told to finish.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, pairwise

from serve_app.admission.transaction import accept
from serve_app.contract import State
from serve_app.errors import RedisUnavailable
from serve_app.journal.attempt import Attempt
from serve_app.journal.entries import Entry
from serve_app.journal.facts import AttemptFacts, Head, RequestFacts, RequestLine, Summary
from serve_app.journal.followers import Follower, Followers
from serve_app.journal.store import JournalStore
from serve_app.journal.writer import JournalWriter
from serve_app.redis.keyspace import queue_key
from serve_app.redis.link import RedisLink
from serve_app.settings import Settings

_HEAD = Head(200, [("content-type", "text/event-stream")])
_LINE = RequestLine("POST", "/v1/chat/completions", "", [("content-type", "application/json")])
_OPENED = AttemptFacts("replica-1", "engine-1", 5)
_SUMMARY = Summary(None, None, 1, 9)
_DEADLINE_S = 600.0


def event(number: int) -> bytes:
    """The n-th event of a response: numbered, as large as a chat chunk."""
    return b"id: %d\ndata: %s\n\n" % (number, b"%d " % number * 40)


@dataclass
class Stream:
    """One request: what was produced for it, and what its reader got."""

    attempt: Attempt
    follower: Follower
    produced: int = 0
    got: bytearray = field(default_factory=bytearray)
    arrivals_s: list[float] = field(default_factory=list)

    @property
    def key(self) -> str:
        return self.attempt.key

    @property
    def accepted(self) -> set[str]:
        """The ids of the attempt's entries that Redis has accepted, as its writer knows."""
        return {str(entry.id) for entry in self.attempt.history}

    @property
    def whole(self) -> bool:
        """Whether the reader got every event once, in order, and the end."""
        ending = self.follower.reader.ending
        expected = b"".join(map(event, range(1, self.produced + 1)))
        return ending is not None and ending.state == State.COMPLETED and expected == self.got

    def pause_s(self, from_s: float) -> float:
        """The longest time without an event, of the gaps that ended after `from_s`."""
        return max((b - a for a, b in pairwise(self.arrivals_s) if b > from_s), default=0.0)


class Load:
    """Several streams of one writer and one subscription."""

    def __init__(self, settings: Settings, events_per_s: float) -> None:
        self._period_s = 1 / events_per_s
        self._queue = queue_key(settings.namespace, "m", "standard")
        self._link = RedisLink(settings.redis)
        self._store = JournalStore(settings, self._link)
        self._writer = JournalWriter(settings)
        self._hub = Followers(settings, self._store, "ingress-1")
        self._over = asyncio.Event()
        self._working: list[asyncio.Task[None]] = []
        self._admitting: asyncio.Task[None] | None = None
        self.streams: list[Stream] = []
        self.waiting: list[str] = []
        """Requests that were accepted and have no worker."""

    async def start(self, streams: int) -> None:
        await self._writer.start()
        await self._hub.start()
        for number in range(streams):
            name = f"req_{number}"
            follower = self._hub.follow_new(name)
            await self._admit(name)
            nonce = b"nonce-%d" % number
            attempt, _ = await self._writer.open(name, 1, nonce, _OPENED)
            self.streams.append(stream := Stream(attempt, follower))
            self._working.append(asyncio.create_task(self._produce(stream)))
            self._working.append(asyncio.create_task(_read(stream)))
        self._admitting = asyncio.create_task(self._keep_admitting())

    async def _admit(self, name: str) -> None:
        now_ms = int(time.time() * 1000)
        deadline_ms = now_ms + int(_DEADLINE_S * 1000)
        channel = self._hub.channel
        facts = RequestFacts("standard", "t", "s", "m", True, now_ms, deadline_ms, channel)
        enqueueing = ("XADD", self._queue, "*", "r", name)
        await accept(self._link, enqueueing, self._store.first_entry(name, _LINE, b"{}", facts))

    async def _keep_admitting(self) -> None:
        for number in count():
            await asyncio.sleep(self._period_s)
            with suppress(RedisUnavailable):  # the client is told
                await self._admit(f"waiting_{number}")
                self.waiting.append(f"waiting_{number}")

    async def _produce(self, stream: Stream) -> None:
        while not self._over.is_set():
            stream.produced += 1
            number = stream.produced
            output = [0, str(number), [number], None, None, None]
            head = _HEAD if number == 1 else None
            stream.attempt.append([output], [event(number)], number, head)
            await asyncio.sleep(self._period_s)
        stream.attempt.finish(State.COMPLETED, None, _SUMMARY, 1)

    async def until_all_go_on(self) -> float:
        """Wait until every reader has got an event that was produced after this call. Returns the
        time (`time.monotonic`).
        """
        marks = [(stream, stream.produced) for stream in self.streams]
        while any(stream.follower.reader.last_event <= mark for stream, mark in marks):
            await asyncio.sleep(self._period_s / 4)
        return time.monotonic()

    async def finish(self) -> None:
        """End every stream, and wait until its reader has everything."""
        self._over.set()
        if self._admitting is not None:
            self._admitting.cancel()
        await asyncio.gather(*self._working)

    async def forgotten(self) -> int:
        """How many accepted requests without a worker have no journal."""
        found = [await self._last(name) for name in self.waiting]
        return found.count(None)

    async def _last(self, name: str) -> Entry | None:
        """The last entry of a journal, once Redis can be reached: this connection may not have been
        needed since the failover.
        """
        while True:
            try:
                return await self._store.last(name)
            except RedisUnavailable:
                await asyncio.sleep(self._period_s)

    async def stop(self) -> None:
        for task in (*self._working, *([self._admitting] if self._admitting else [])):
            task.cancel()
        await self._writer.stop()
        await self._hub.stop()
        await self._link.close()


async def _read(stream: Stream) -> None:
    reader = stream.follower.reader
    while True:
        if body := reader.take():
            stream.got += body
            stream.arrivals_s.append(time.monotonic())
        if reader.ending is not None and not reader.more:
            return
        if not reader.more:
            await stream.follower.wait()


@asynccontextmanager
async def load(settings: Settings, streams: int, events_per_s: float) -> AsyncIterator[Load]:
    """Streams that run meanwhile."""
    made = Load(settings, events_per_s)
    try:
        await made.start(streams)
        yield made
    finally:
        await made.stop()
