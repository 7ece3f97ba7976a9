"""A claimed request to its end, on a real Redis: what counts against it, and how long it waits for its turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest
from journal_helpers import LINE, SUMMARY, World, world

from serve_app.attempts import Outcome
from serve_app.carrier import Carrier
from serve_app.errors import Fenced
from serve_app.journal.attempt import Attempt
from serve_app.journal.entries import AttemptFacts, RequestFacts, decode_facts, seal_id
from serve_app.journal.writer import JournalWriter
from serve_app.redis_clock import RedisClock
from serve_app.request_queue.dead_letters import DeadLetters
from serve_app.request_queue.queue import QueueEntry
from serve_app.request_queue.suspects import Suspects
from serve_app.routing.fleet import AWAY, DRAINED, HUNG, Fleet
from serve_app.settings import TelemetrySettings
from serve_app.telemetry import Telemetry
from serve_app.tracing import Tracing

POISON_AFTER = 3
REPLICAS = [f"replica-{number}" for number in range(9)]


class Dispatch:
    """One ingress's carrier, and workers that open their attempts and then do nothing until they are told."""

    def __init__(self, w: World, writer: JournalWriter) -> None:
        self.w = w
        self.fleet = Fleet()
        self.dead = DeadLetters(w.link, w.settings.namespace, 10)
        self.suspects = Suspects(w.redis, w.settings.namespace)
        self.opened: asyncio.Queue[tuple[str, Attempt]] = asyncio.Queue()
        self._writer = writer
        self._replicas = iter(REPLICAS)
        self.fleet.serving(REPLICAS)
        self.fleet.leased(REPLICAS)
        tracing = Tracing(TelemetrySettings(), "test", "ingress-1")
        self.carrier = Carrier(
            w.store, w.queue(), self.dead, self.suspects, self.fleet, self._execute, Telemetry(), tracing,
            RedisClock(), POISON_AFTER,
        )  # fmt: skip

    async def _execute(self, request_id: str, epoch: int, session: str, cause: str) -> Outcome:
        replica = next(self._replicas)
        self.fleet.place(request_id, replica)
        attempt, _ = await self._writer.open(request_id, epoch, replica.encode(), AttemptFacts(replica, "e", 0, cause))
        self.opened.put_nowait((replica, attempt))
        try:
            await asyncio.shield(attempt.closed)
        except Fenced:
            return Outcome.FENCED
        return Outcome.ENDED

    async def claim(self, timeout_s: float = 60) -> QueueEntry:
        now_ms = int(time.time() * 1000)
        facts = RequestFacts("standard", "t", "s", "m", True, now_ms, now_ms + int(timeout_s * 1000), "")
        fields = self.w.queue().fields("req_1", "t", "s", facts.deadline_ms, 7)
        await self.w.store.admit("req_1", LINE, b"{}", facts, (self.w.queue().stream("standard"), fields))
        (entry,) = await self.w.queue().claim(1)
        return entry

    def hangs(self, replica: str) -> None:
        """Its lease ends; the next look finds it well again."""
        self.fleet.leased(set(REPLICAS) - {replica})
        self.fleet.leased(REPLICAS)

    async def ending(self) -> tuple[str, str]:
        *_, last = await self.w.entries()
        return last.state, last.reason

    async def causes(self) -> list[str]:
        """By which the attempts before were lost, as the journal has it."""
        opened = [entry for entry in await self.w.entries() if entry.id.epoch and not entry.id.seq]
        return [decode_facts(entry, AttemptFacts).cause for entry in opened[1:]]


@asynccontextmanager
async def dispatch(redis_url: str, namespace: str) -> AsyncIterator[Dispatch]:
    async with world(redis_url, namespace) as w:
        yield Dispatch(w, await w.writer())


def test_a_request_that_hangs_every_worker_is_given_up(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with dispatch(redis_url, namespace) as its:
            carrying = asyncio.create_task(its.carrier.carry(await its.claim()))
            for _ in range(POISON_AFTER):
                replica, _ = await its.opened.get()
                its.hangs(replica)
            await carrying
            assert await its.ending() == ("failed", "poison")
            assert await its.causes() == [HUNG, HUNG]
            (letter,) = await its.dead.read()
            assert (letter.request_id, letter.attempts) == ("req_1", POISON_AFTER)

    asyncio.run(main())


@pytest.mark.parametrize("cause", [DRAINED, AWAY])
def test_what_no_request_can_be_blamed_for_does_not_count(redis_url: str, namespace: str, cause: str) -> None:
    async def main() -> None:
        async with dispatch(redis_url, namespace) as its:
            carrying = asyncio.create_task(its.carrier.carry(await its.claim()))
            for _ in range(POISON_AFTER + 1):
                replica, _ = await its.opened.get()
                if cause == DRAINED:
                    its.fleet.serving(set(REPLICAS) - {replica})
                    its.fleet.leased(set(REPLICAS) - {replica})  # it gives its lease back at its end
                    its.fleet.serving(REPLICAS)
                else:
                    its.fleet.leased(None)
                    its.fleet.leased(set(REPLICAS) - {replica})
                its.fleet.leased(REPLICAS)
            _, attempt = await its.opened.get()
            attempt.finish("completed", "", SUMMARY, None)
            await carrying
            assert await its.causes() == [cause] * (POISON_AFTER + 1)

    asyncio.run(main())


def test_a_worker_that_hangs_under_an_adopted_request_counts_as_well(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with dispatch(redis_url, namespace) as its:
            await its.claim()
            writer = await its.w.writer()
            for epoch, cause in ((1, ""), (2, HUNG), (3, HUNG)):
                await writer.open("req_1", epoch, b"%d" % epoch, AttemptFacts("replica-0", "e", 0, cause))
            its.fleet.leased(REPLICAS[1:])
            (entry,) = await its.w.queue("ingress-2")._claim_from(its.w.queue().stream("standard"), "ingress-1", 0, ())
            its.carrier._queue = its.carrier._adopted._queue = its.w.queue("ingress-2")
            await its.carrier.carry(entry)
            assert await its.ending() == ("failed", "poison")

    asyncio.run(main())


def test_a_suspect_waits_for_its_turn_until_its_deadline_and_no_longer(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with dispatch(redis_url, namespace) as its:
            entry = await its.claim(timeout_s=1.5)
            async with its.suspects.alone(within_s=5) as turn:
                assert turn
                carrying = asyncio.create_task(its.carrier.carry(entry))
                for _ in range(POISON_AFTER - 1):
                    replica, _ = await its.opened.get()
                    its.hangs(replica)
                await asyncio.wait_for(carrying, 10)
            assert await its.ending() == ("expired", "deadline")
            assert time.time() * 1000 < entry.deadline_ms + 2_000
            assert its.opened.empty()

    asyncio.run(main())


def test_an_adopted_request_that_a_seal_below_a_newer_opening_has_ended_is_let_go(
    redis_url: str, namespace: str
) -> None:
    async def main() -> None:
        async with dispatch(redis_url, namespace) as its:
            entry = replace(await its.claim(), taken_over=True)
            key, facts = its.w.store.key("req_1"), msgspec.json.encode(AttemptFacts("replica-0", "e", 0))
            for entry_id, fields in (("1-0", {"n": "1"}), (seal_id(1), {"n": "1", "k": "failed"}), ("2-0", {"n": "2"})):
                await its.w.redis.xadd(key, {**fields, "m": facts}, id=str(entry_id))
            await asyncio.wait_for(its.carrier.carry(entry), 5)
            assert await its.w.redis.xlen(entry.stream) == 0

    asyncio.run(main())
