"""A journal's surroundings on a real Redis: settings, clients, a writer, a hub, and a request to work on."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from scripts.local import processes, redis_server
from serve_app.journal.attempt import Attempt
from serve_app.journal.client import connect_redis
from serve_app.journal.connection import RedisLink
from serve_app.journal.entries import (
    AttemptFacts,
    Entry,
    Head,
    RequestFacts,
    RequestLine,
    Summary,
    entry_from_redis,
    wake_channel,
)
from serve_app.journal.hub import Follower, FollowerHub
from serve_app.journal.store import JournalStore
from serve_app.journal.writer import JournalWriter
from serve_app.request_queue.queue import RequestQueue
from serve_app.settings import Settings

HEAD = Head(200, [("content-type", "text/event-stream")])
OPENED = AttemptFacts("replica-1", "engine-1", 5)
LINE = RequestLine("POST", "/v1/chat/completions", "", [("content-type", "application/json")])
SUMMARY = Summary(None, None, 1, 9)
PATIENCE_S = 60.0


def event(number: int) -> bytes:
    """What a numberer makes of the response's n-th event."""
    return b"id: %d\ndata: %d\n\n" % (number, number)


def events(first: int, last: int) -> bytes:
    """Events `first` to `last`."""
    return b"".join(event(number) for number in range(first, last + 1))


def add(attempt: Attempt, number: int) -> None:
    """Append the n-th event."""
    head = HEAD if number == 1 else None
    attempt.append([[0, str(number), [number], None, None, None]], [event(number)], number, head)


def finish(attempt: Attempt) -> None:
    """Complete the request."""
    attempt.append([], [], attempt_events(attempt), HEAD)
    attempt.finish("completed", "", SUMMARY, 1)


def attempt_events(attempt: Attempt) -> int:
    """Number of the last event that was appended."""
    return attempt._events


async def eventually(condition: Callable[[], Awaitable[Any] | Any]) -> Any:
    """Until something holds that nobody announces."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            result = condition()
            if asyncio.iscoroutine(result):
                result = await result
            if result:
                return result
            await asyncio.sleep(0.005)


class World:
    """One namespace: its settings, a client, and what was started in it."""

    def __init__(self, url: str, namespace: str, **sections: Any) -> None:
        self.settings = Settings.model_validate({"namespace": namespace, "redis": {"url": url}, **sections})
        self.redis: Redis = connect_redis(self.settings.redis)
        self.link = RedisLink(self.settings.redis)
        self.store = JournalStore(self.settings, self.link)
        self.channel = wake_channel(namespace, "ingress-1")
        self._started: list[JournalWriter | FollowerHub] = []

    @cached_property
    def operator(self) -> Redis:
        """Does by hand what the service's own user may not do."""
        client: Redis = Redis.from_url(redis_server.as_operator(self.settings.redis.url), protocol=2)
        return client

    def queue(self, consumer: str = "ingress-1") -> RequestQueue:
        """The queue as one consumer sees it."""
        return RequestQueue(self.redis, self.link, self.settings.namespace, self.settings.model.name, consumer)

    async def writer(self) -> JournalWriter:
        """A worker process's writer."""
        writer = JournalWriter(self.settings)
        await writer.start()
        self._started.append(writer)
        return writer

    async def hub(self) -> FollowerHub:
        """The subscription of `ingress-1`."""
        hub = FollowerHub(self.settings, self.store, "ingress-1")
        await hub.start()
        self._started.append(hub)
        await eventually(lambda: self.subscribers())
        return hub

    async def subscribers(self) -> int:
        """How many listen to the wake-ups of `ingress-1`."""
        ((_, count),) = await self.redis.pubsub_numsub(self.channel)
        return int(count)

    async def admit(self, request_id: str = "req_1", wake: str | None = None) -> str:
        """Accept a request."""
        now_ms = int(time.time() * 1000)
        channel = self.channel if wake is None else wake
        facts = RequestFacts("standard", "t", "s", "m", True, now_ms, now_ms + 60_000, channel)
        queue = self.queue()
        fields = queue.fields(request_id, "t", "s", facts.deadline_ms, 7)
        await self.store.admit(request_id, LINE, b"{}", facts, (queue.stream("standard"), fields))
        return request_id

    async def opened(self, writer: JournalWriter, epoch: int = 1, nonce: bytes = b"nonce-1") -> Attempt:
        """Attempt `epoch` of `req_1`."""
        attempt, _ = await writer.open("req_1", epoch, nonce, OPENED)
        return attempt

    async def entries(self, request_id: str = "req_1") -> list[Entry]:
        """The journal as it stands in Redis."""
        raw: Any = await self.redis.execute_command("XRANGE", self.store.key(request_id), "-", "+")
        return [entry_from_redis(item) for item in raw]

    async def ids(self) -> list[str]:
        """The ids of the journal's entries."""
        return [str(entry.id) for entry in await self.entries()]

    async def stop(self) -> None:
        """End all that was started here."""
        for part in self._started:
            await part.stop()
        await self.link.close()
        await self.redis.aclose()
        if "operator" in self.__dict__:
            await self.operator.aclose()


@asynccontextmanager
async def world(url: str, namespace: str, **sections: Any) -> AsyncIterator[World]:
    """A `World` for the length of a test."""
    made = World(url, namespace, **sections)
    try:
        async with asyncio.timeout(60):
            yield made
    finally:
        await made.stop()


async def everything(follower: Follower) -> bytes:
    """All that a client would get."""
    got = []
    while True:
        got.append(follower.reader.take())
        if follower.reader.ending is not None and not follower.reader.more:
            return b"".join(got)
        if follower.reader.more:
            continue
        await follower.wait()


class PrivateRedis:
    """A Redis that can be killed, and brought back as it was some time before."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._data = folder / "data"
        server = redis_server.start(self._data, namespace="*")
        self.pid, self.port, self.url = server.pid, server.port, server.url()

    def kill(self) -> None:
        """As a crash would."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    async def start(self) -> None:
        """On the same port, from the same append-only file."""
        self.pid = (await asyncio.to_thread(redis_server.start, self._data, self.port, namespace="*")).pid

    def remember(self) -> None:
        """Keep the append-only file as it is now."""
        shutil.copytree(self._data, self._folder / "old")

    def forget(self) -> None:
        """Put the remembered append-only file back."""
        shutil.rmtree(self._data)
        shutil.copytree(self._folder / "old", self._data)

    def end(self) -> None:
        """End it for good."""
        if processes.is_alive(self.pid):
            processes.end(self.pid)
