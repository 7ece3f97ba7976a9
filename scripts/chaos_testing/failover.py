"""`scripts/chaos failover`: kill the primary of three Redis with Sentinel under streams, again and
again, and count what the new primary lacked and what the workers' writers restored.

Without Ray: a worker's writer and an ingress's subscription in this process, on Redis and Sentinels
as `helm/redis-ha.yaml` configures them. Each stream produces an event every few milliseconds until
it is told to finish.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import NamedTuple

from scripts.chaos_testing.sentinels import Sentinels
from serve_app.contract import State
from serve_app.errors import RedisUnavailable
from serve_app.ingress.followers import Follower, Followers
from serve_app.journal.attempt_log import AttemptLog
from serve_app.journal.entries import AttemptFacts, Entry, Head, RequestFacts, RequestLine, Summary
from serve_app.local import ports, processes, surroundings
from serve_app.local.environment import ROOT
from serve_app.policy.work import Work
from serve_app.redis.link import RedisLink
from serve_app.requests.lifecycle import Offer, accept
from serve_app.requests.store import JournalStore
from serve_app.settings import Settings
from workers.journal_writer import JournalWriter

_STREAMS, _EVENTS_PER_S = 16, 50.0
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

    attempt: AttemptLog
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
        self._settings = settings
        self._link = RedisLink(settings.redis)
        self._store = JournalStore(settings, self._link)
        self._writer = JournalWriter(settings)
        self._hub = Followers(settings, self._store, "ingress-1")
        self._over = asyncio.Event()
        self._working: list[asyncio.Task[None]] = []
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
        self._working.append(asyncio.create_task(self._keep_admitting()))

    async def _admit(self, name: str) -> None:
        now_ms = int(time.time() * 1000)
        deadline_ms = now_ms + int(_DEADLINE_S * 1000)
        channel = self._hub.channel
        facts = RequestFacts("standard", "t", "s", "m", True, now_ms, deadline_ms, channel)
        await accept(self._link, self._settings, Offer(name, _LINE, b"{}", facts, Work(1)))

    async def _keep_admitting(self) -> None:
        for number in count():
            await asyncio.sleep(self._period_s)
            if self._over.is_set():
                return
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
        stream.attempt.stop(State.COMPLETED, None, _SUMMARY, 1)

    async def until_all_go_on(self) -> None:
        """Wait until every reader has got an event that was produced after this call."""
        marks = [(stream, stream.produced) for stream in self.streams]
        while any(stream.follower.reader.last_event <= mark for stream, mark in marks):
            await asyncio.sleep(self._period_s / 4)

    async def finish(self) -> None:
        """End every stream, and wait until its reader has everything."""
        self._over.set()
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
                record = await self._store.record(name)
                return record.last if record else None
            except RedisUnavailable:
                await asyncio.sleep(self._period_s)

    async def stop(self) -> None:
        for task in self._working:
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


class Case(NamedTuple):
    """One row of the table."""

    delay_ms: int
    """How late replicas get what the primary has accepted."""
    min_replicas: int
    """`min-replicas-to-write`."""


class Failover(NamedTuple):
    """One kill."""

    pause_s: float
    entries: int
    """How many entries of running requests Redis had accepted."""
    lacked: int
    """How many of them the new primary did not have when the old one was gone."""
    missing: int
    """How many of them it did not have when every stream went on."""


class Outcome(NamedTuple):
    """One case after all its kills."""

    case: Case
    failovers: list[Failover]
    streams: int
    whole: int
    accepted: int
    """Requests that were accepted and had no worker yet."""
    forgotten: int
    """How many of them are gone."""

    @property
    def lost_nothing(self) -> bool:
        """Whether every stream is whole."""
        return self.whole == self.streams and not any(one.missing for one in self.failovers)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/chaos failover", description=__doc__)
    add = parser.add_argument
    add("--strikes", type=int, default=5, help="kills in each case (5)")
    add("--delays-ms", default="0", help="how late replicas get their data, with commas (0)")
    add("--min-replicas", default="1", help="values of min-replicas-to-write, with commas (1)")
    options = parser.parse_args(arguments)
    options.cases = [
        Case(delay_ms, count)
        for delay_ms in map(int, options.delays_ms.split(","))
        for count in map(int, options.min_replicas.split(","))
    ]
    return options


@contextmanager
def group(folder: Path, case: Case) -> Iterator[Sentinels]:
    """Redis and Sentinels, with late replicas if the case wants them."""
    cables: dict[int, int] = {}

    def announced(port: int) -> int:
        if case.delay_ms and port not in cables:
            cables[port] = ports.free_port()
            command = [sys.executable, "-m", "scripts.chaos_testing.cable", "--delay-s"]
            command += [str(case.delay_ms / 1000), str(cables[port]), str(port)]
            pid = processes.start(command, folder / "cable.log", os.environ, ROOT)
            started.callback(processes.end, pid)
        return cables.get(port, port)

    with ExitStack() as started:
        settings = {"min-replicas-to-write": case.min_replicas}
        sentinels = Sentinels(folder / "redis", settings=settings, announced=announced)
        started.callback(sentinels.stop)
        yield sentinels


async def strike(sentinels: Sentinels, running: Load) -> Failover:
    """Kill the primary, and wait until every stream goes on."""
    await running.until_all_go_on()
    await asyncio.sleep(random.uniform(0.2, 1.2))  # anywhere between two entries
    primary = await asyncio.to_thread(sentinels.all_back)
    killed_s = time.monotonic()
    sentinels.kill(primary)
    await asyncio.to_thread(sentinels.replicas_are_cut_off, primary)
    accepted = {stream.key: stream.accepted for stream in running.streams}
    had = {
        port: await asyncio.to_thread(_ids, sentinels, port, running.streams)
        for port in sentinels.ports_of
        if port != primary
    }
    successor = await asyncio.to_thread(sentinels.until_failed_over, primary)
    await running.until_all_go_on()
    has = await asyncio.to_thread(_ids, sentinels, successor, running.streams)
    return Failover(
        max(stream.pause_s(killed_s) for stream in running.streams),
        sum(map(len, accepted.values())),
        sum(len(ids - had[successor][key]) for key, ids in accepted.items()),
        sum(len(ids - has[key]) for key, ids in accepted.items()),
    )


def _ids(sentinels: Sentinels, port: int, streams: list[Stream]) -> dict[str, set[str]]:
    """The ids of the entries that a server has of each stream."""
    with sentinels.server(port) as server, server.pipeline(transaction=False) as pipeline:
        for stream in streams:
            pipeline.xrange(stream.key)
        found = pipeline.execute()
    return {s.key: {i for i, _ in entries} for s, entries in zip(streams, found, strict=True)}


async def measure(folder: Path, case: Case, strikes: int) -> Outcome:
    failovers = []
    with group(folder, case) as sentinels:
        settings = Settings.model_validate({"redis": {"url": sentinels.url}})
        async with load(settings, _STREAMS, _EVENTS_PER_S) as running:
            for _ in range(strikes):
                failovers.append(one := await strike(sentinels, running))
                print(f"  {case} {one}", flush=True)
            await running.finish()
            whole = sum(stream.whole for stream in running.streams)
            ended = len(running.streams), whole, len(running.waiting), await running.forgotten()
    return Outcome(case, failovers, *ended)


def table(outcomes: list[Outcome]) -> str:
    """The table that the terminal shows at the end, in the form of the documents."""
    lines = [
        "| replicas late by | `min-replicas-to-write` | pause p50 / max, s | entries the new "
        "primary lacked, per kill | still lacked later | streams whole | waiting requests "
        "forgotten |",
        "|---|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        pauses_s = [one.pause_s for one in outcome.failovers]
        lacked = [one.lacked for one in outcome.failovers]
        lines.append(
            f"| {outcome.case.delay_ms} ms | {outcome.case.min_replicas} "
            f"| {statistics.median(pauses_s):.1f} / {max(pauses_s):.1f} "
            f"| {min(lacked)} to {max(lacked)} | {sum(one.missing for one in outcome.failovers)} "
            f"| {outcome.whole} of {outcome.streams} "
            f"| {outcome.forgotten} of {outcome.accepted} |"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    surroundings.leave()
    logging.getLogger("hermes").addHandler(logging.NullHandler())  # the table tells enough
    outcomes = []
    for case in options.cases:
        with tempfile.TemporaryDirectory(prefix="failover-") as folder:
            outcomes.append(asyncio.run(measure(Path(folder), case, options.strikes)))
    print(table(outcomes))
    return 0 if all(outcome.lost_nothing for outcome in outcomes) else 1
