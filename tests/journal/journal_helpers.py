"""What a journal needs, on a real Redis: settings, clients, a writer, followers, and a request."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from redis import Redis as SyncRedis
from redis.asyncio import Redis

from serve_app.contract import Reason, State
from serve_app.ingress.followers import Follower, Followers
from serve_app.journal.attempt_log import AttemptLog
from serve_app.journal.entries import (
    AttemptFacts,
    Entry,
    Head,
    RequestFacts,
    RequestLine,
    Summary,
    entry_from_redis,
)
from serve_app.journal.usage import Usage
from serve_app.local import processes, redis_server
from serve_app.observability.metrics import Telemetry
from serve_app.policy.tenant_limits import NO_LIMITS, Limits
from serve_app.policy.work import Work
from serve_app.redis.keyspace import journal_key, queue_key, wake_channel
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import all_answered
from serve_app.request_queue import Depth, QueueDepths, RequestQueue
from serve_app.requests.dead_letters import DeadLetters
from serve_app.requests.endings import Endings
from serve_app.requests.lifecycle import Ended, Offer, accept, end
from serve_app.requests.store import JournalStore
from serve_app.settings import Settings
from tests import permits
from tests.waiting import PATIENCE_S, eventually, until
from workers.journal_writer import JournalWriter

HEAD = Head(200, [("content-type", "text/event-stream")])
OPENED = AttemptFacts("replica-1", "engine-1", 5)
LINE = RequestLine("POST", "/v1/chat/completions", "", [("content-type", "application/json")])
FACTS = RequestFacts("standard", "t", "s", "hermes-tiny", True, 1, 60_000, "")
SUMMARY = Summary(FACTS, None, 1, 9)
WHOLE_S = 240.0
"""A whole test, of which each wait may take long on a busy machine."""


def event(number: int) -> bytes:
    """The n-th event of the response, as the numberer writes it."""
    return b"id: %d\ndata: %d\n\n" % (number, number)


def events(first: int, last: int) -> bytes:
    """Events `first` to `last`."""
    return b"".join(event(number) for number in range(first, last + 1))


def add(attempt: AttemptLog, *numbers: int) -> None:
    """Append the events of these numbers."""
    for n in numbers:
        head = HEAD if n == 1 else None
        used = Usage(output=n)
        attempt.append([[0, str(n), [n], None, None, None]], [event(n)], n, head, used)


async def added(attempt: AttemptLog, number: int) -> None:
    """Append the n-th event, and wait until Redis has accepted it."""
    add(attempt, number)
    await eventually(lambda: not attempt.pending)


def finish(attempt: AttemptLog) -> None:
    """Complete the request."""
    attempt.append([], [], attempt._events, HEAD)
    attempt.stop(State.COMPLETED, None, SUMMARY, 1)


async def complete(attempt: AttemptLog) -> None:
    """Complete the request, and wait until Redis has accepted that."""
    finish(attempt)
    await attempt.closed


def redis_settings(url: str) -> dict[str, Any]:
    """Settings with long timeouts, so that a slow machine does not look like an unreachable Redis.
    Tests of the timeouts themselves give `{"url": url}`.
    """
    return {
        "url": url,
        "connect_timeout_s": PATIENCE_S,
        "response_timeout_s": PATIENCE_S,
        "admission_timeout_s": PATIENCE_S,
    }


class World:
    """One namespace: its settings, a client, and everything started in it."""

    def __init__(self, url: str, namespace: str, **sections: Any) -> None:
        self.settings = Settings.model_validate(
            {"namespace": namespace, "redis": redis_settings(url), **sections}
        )
        self.link = RedisLink(self.settings.redis)
        self.store = JournalStore(self.settings, self.link)
        self.telemetry = Telemetry()
        self.endings = Endings(self.settings, self.link, self.store, self.telemetry)
        self.channel = wake_channel(namespace, "ingress-1")
        self._started: list[JournalWriter | Followers] = []

    @cached_property
    def redis(self) -> Any:
        """Runs commands by hand, as the service's own user."""
        return Redis.from_url(self.settings.redis.url, protocol=2, socket_timeout=PATIENCE_S)

    @cached_property
    def operator(self) -> Any:
        """Runs commands by hand that the service's own user may not run."""
        client: Any = Redis.from_url(
            redis_server.as_operator(self.settings.redis.url), protocol=2, socket_timeout=PATIENCE_S
        )
        return client

    def queue(self, consumer: str = "ingress-1") -> RequestQueue:
        """The queue as one consumer sees it, in a freshly started process."""
        settings = self.settings
        dead = DeadLetters(self.link, settings.namespace, keep=100)
        return RequestQueue(self.link, settings.namespace, settings.model.name, dead, consumer)

    def stream(self, request_class: str) -> str:
        """The Redis key of the queue of a class."""
        return queue_key(self.settings.namespace, self.settings.model.name, request_class)

    async def depths(self) -> dict[str, Depth]:
        """How many requests wait and are claimed, by class."""
        return (await QueueDepths(self.queue()).look())[0]

    async def writer(self) -> JournalWriter:
        """A worker process's writer."""
        writer = JournalWriter(self.settings)
        await writer.start()
        self._started.append(writer)
        return writer

    async def hub(self, ingress_id: str = "ingress-1") -> Followers:
        """The subscription of an ingress."""
        hub = Followers(self.settings, self.store, ingress_id)
        await hub.start()
        self._started.append(hub)
        await eventually(lambda: self.subscribers(hub.channel))
        return hub

    async def subscribers(self, channel: str = "") -> int:
        """Number of subscribers to the wake-ups of an ingress; of `ingress-1`, if none is named."""
        ((_, count),) = await self.redis.pubsub_numsub(channel or self.channel)
        return int(count)

    async def admit(
        self,
        request_id: str = "req_1",
        *,
        wake: str | None = None,
        request_class: str = "standard",
        timeout_s: float = 60.0,
        tenant: str = "t",
        body: bytes = b"{}",
        sequences: int = 1,
    ) -> str:
        """Accept a request."""
        now_ms = int(time.time() * 1000)
        deadline_ms = now_ms + int(timeout_s * 1000)
        channel = self.channel if wake is None else wake
        model = self.settings.model.name
        facts = RequestFacts(request_class, tenant, "s", model, True, now_ms, deadline_ms, channel)
        return await self.accept(request_id, facts, body, sequences)

    async def accept(
        self,
        request_id: str,
        facts: RequestFacts,
        body: bytes = b"{}",
        sequences: int = 1,
        limits: Limits = NO_LIMITS,
    ) -> str:
        """Accept a request with all its facts given."""
        work = Work(7, kind="chat/completions s1", sequences=sequences)
        offer = Offer(request_id, LINE, body, facts, work, limits)
        await accept(self.link, self.settings, offer)
        return request_id

    async def opened(
        self, writer: JournalWriter, epoch: int = 1, nonce: bytes = b"nonce-1"
    ) -> AttemptLog:
        """Open attempt `epoch` of `req_1`."""
        attempt, _ = await writer.open("req_1", epoch, nonce, OPENED)
        return attempt

    async def started(self, **admission: Any) -> AttemptLog:
        """Accept `req_1` and open its first attempt."""
        await self.admit(**admission)
        return await self.opened(await self.writer())

    async def followed(self) -> tuple[Follower, AttemptLog]:
        """The same, with a follower from before it is accepted."""
        follower = (await self.hub()).follow_new("req_1")
        return follower, await self.started()

    def told_the_time(self) -> None:
        """As the renewal of a lease does."""
        self.store.clock.told((int(time.time()), 0), time.monotonic())

    async def ended(self, request_id: str, state: State, reason: Reason | None = None) -> None:
        """End a request as a worker would, but for its output."""
        record = await self.store.record(request_id)
        assert record
        summary = record.ending(self.store.clock.now_ms())
        terminal = Entry.terminal_from_outside(b"nonce", state, reason, summary)
        its = Ended(request_id, (terminal,), summary, record.first.queue_entry)
        assert all_answered(await self.link.call([end(self.settings, its)])) == [1]

    async def entries(self, request_id: str = "req_1") -> list[Entry]:
        """The journal's entries in Redis."""
        key = self.store.key(request_id)
        (raw,) = all_answered(await self.link.call([("XRANGE", key, "-", "+")], large=True))
        return [entry_from_redis(item) for item in raw]

    async def ending(self, request_id: str = "req_1") -> tuple[str, str]:
        """State and reason of the ending that counts; empty if there is none."""
        ends = [entry for entry in await self.entries(request_id) if entry.ends]
        return (ends[0].state or "", ends[0].reason or "") if ends else ("", "")

    async def journals(self) -> list[str]:
        """The ids of all requests that have a journal."""
        pattern = journal_key(self.settings.namespace, "*")
        found = [key.decode() async for key in self.operator.scan_iter(pattern)]
        return [key.rpartition(":")[2] for key in found]

    async def compacted(self, request_id: str = "req_1") -> bool:
        """Whether a journal has one entry."""
        return bool(await self.redis.xlen(self.store.key(request_id)) == 1)

    async def ids(self) -> list[str]:
        """The ids of the journal's entries."""
        return [str(entry.id) for entry in await self.entries()]

    @asynccontextmanager
    async def full(self, over_bytes: int = 1 << 40) -> AsyncIterator[None]:
        """A Redis that has so much more than it may."""
        used: int = (await self.redis.info("memory"))["used_memory"]
        before = (await self.operator.config_get("maxmemory"))["maxmemory"]
        await self.operator.config_set("maxmemory", max(1, used - over_bytes))
        try:
            yield
        finally:
            await self.operator.config_set("maxmemory", before)  # other tests use this Redis, too

    async def stop(self) -> None:
        """Stop everything that was started here."""
        for part in self._started:
            await part.stop()
        await self.link.close()
        for client in {"redis", "operator"} & self.__dict__.keys():
            await self.__dict__[client].aclose()


@asynccontextmanager
async def world(
    url: str, namespace: str, within_s: float = WHOLE_S, **sections: Any
) -> AsyncIterator[World]:
    """A `World` during a test."""
    made = World(url, namespace, **sections)
    try:
        async with asyncio.timeout(within_s):
            yield made
    finally:
        await made.stop()


async def everything(follower: Follower) -> bytes:
    """All bytes that a client would get."""
    got = []
    while True:
        got.append(follower.reader.take())
        if follower.reader.ending is not None and not follower.reader.more:
            return b"".join(got)
        if not follower.reader.more or got[-1] == b"":  # that of no stream comes with its end
            await follower.wait()


def until_written(operator_url: str) -> None:
    """Wait until the append-only file holds all that was answered: under a slow fsync (`everysec`)
    Redis keeps up to two seconds of it in memory, and a kill would lose those.
    """
    with SyncRedis.from_url(operator_url, protocol=2, socket_timeout=PATIENCE_S) as operator:
        until("all is in the file", lambda: not operator.info("persistence")["aof_buffer_length"])


class PrivateRedis:
    """A Redis that can be killed, and restored to an earlier state."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._data = folder / "data"
        server = permits.narrow(redis_server.start(self._data, namespace="*"))
        self.pid, self.port, self.url = server.pid, server.port, server.url()
        self.client: Any = Redis.from_url(self.url, protocol=2, socket_timeout=PATIENCE_S)

    def run(self, *words: object) -> None:
        """Run a command as its operator."""
        with SyncRedis.from_url(
            redis_server.as_operator(self.url), protocol=2, socket_timeout=PATIENCE_S
        ) as operator:
            operator.execute_command(*words)

    def kill(self) -> None:
        """Kill it, as a crash would; what it has answered is in its file."""
        until_written(redis_server.as_operator(self.url))
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    async def start(self, namespace: str = "*") -> None:
        """Start it on the same port, from the same append-only file. `namespace`: whose keys the
        service's user may use.
        """
        self.pid = (
            await asyncio.to_thread(redis_server.start, self._data, self.port, namespace=namespace)
        ).pid

    def remember(self) -> None:
        """Save the current append-only file."""
        shutil.copytree(self._data, self._folder / "old")

    def forget(self) -> None:
        """Restore the saved append-only file."""
        shutil.rmtree(self._data)
        shutil.copytree(self._folder / "old", self._data)

    def end(self) -> None:
        """Stop it for good."""
        if processes.is_alive(self.pid):
            processes.end(self.pid)
