"""A claimed request until its end, on a real Redis: what counts against it, and how long it waits
for its turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from serve_app import timings
from serve_app.cluster.replicas import Replicas
from serve_app.contract import (
    AttemptResult,
    CallResult,
    Cause,
    CompletionStats,
    Reason,
    WorkerLost,
)
from serve_app.dispatch import attempts
from serve_app.dispatch.attempts import StallReason
from serve_app.errors import Fenced
from serve_app.journal.attempt_log import AttemptLog
from serve_app.journal.entries import AttemptFacts, decode_facts
from serve_app.request_queue import QueueEntry
from serve_app.requests.dead_letters import DeadLetter
from tests.journal.admitting import StillIngress
from tests.journal.journal_helpers import World, finish
from tests.waiting import eventually
from workers.journal_writer import JournalWriter

POISON_AFTER = 3
REPLICAS = [f"replica-{number}" for number in range(9)]


class Dispatch(StillIngress):
    """An ingress, and workers that open their attempts and then do nothing until they are told."""

    def __init__(self, w: World, writer: JournalWriter) -> None:
        self.w = w
        self.replicas = Replicas()
        self.opened: asyncio.Queue[tuple[str, AttemptLog]] = asyncio.Queue()
        self._writer = writer
        self.replicas.serving(REPLICAS)
        self.replicas.leased(REPLICAS)
        super().__init__(w.settings, execute=self._execute, replicas=self.replicas)

    async def _execute(
        self, request_id: str, epoch: int, replica: str, cause: str
    ) -> AttemptResult:
        opened = AttemptFacts(replica, "e", 0, cause)
        try:
            attempt, _ = await self._writer.open(request_id, epoch, replica.encode(), opened)
            self.opened.put_nowait((replica, attempt))
            await asyncio.shield(attempt.closed)
        except Fenced:
            return AttemptResult(CallResult.FENCED)
        return AttemptResult(CallResult.ENDED)

    async def claim(self, timeout_s: float = 60) -> QueueEntry:
        await self.w.admit(timeout_s=timeout_s)
        (entry,) = await self.queue.claim(1)
        return entry

    def hangs(self, replica: str) -> None:
        """The worker's lease expires; at the next check it is well again."""
        self.replicas.leased(set(REPLICAS) - {replica})
        self.replicas.leased(REPLICAS)


@pytest.fixture
async def its(w: World) -> AsyncIterator[Dispatch]:
    made = Dispatch(w, await w.writer())
    yield made
    await made.close()


async def test_a_request_that_hangs_every_worker_is_given_up(w: World, its: Dispatch) -> None:
    running = asyncio.create_task(its.attempts.run(await its.claim()))
    for _ in range(POISON_AFTER):
        replica, _ = await its.opened.get()
        its.hangs(replica)
    await running
    assert await w.ending() == ("failed", "poison")
    opened = [entry for entry in await w.entries() if entry.id.epoch and not entry.id.seq]
    causes = [decode_facts(entry, AttemptFacts).cause for entry in opened]
    assert causes == ["", Cause.HUNG, Cause.HUNG]
    (letter,) = [one async for one in its._dead.each()]
    assert isinstance(letter, DeadLetter)
    assert (letter.request_id, letter.attempts) == ("req_1", POISON_AFTER)


@pytest.mark.parametrize("which", ["its own", "of a duplicate", "none"])
async def test_a_queue_entry_is_acknowledged_once_by_the_end_or_by_its_ingress(
    w: World, its: Dispatch, which: str
) -> None:
    entry = await its.claim()
    acknowledged = {"its own": entry.entry_id, "of a duplicate": "1-1", "none": ""}[which]

    async def execute(*_: object) -> AttemptResult:
        return AttemptResult(CallResult.ENDED, CompletionStats(7), acknowledged)

    its.attempts._execute = execute
    assert await its.attempts.run(entry) == CompletionStats(7)
    assert await w.redis.xlen(entry.stream) == (which == "its own"), "which the end would remove"


@pytest.mark.parametrize("adopted", [False, True])
async def test_a_worker_that_cannot_reach_redis_when_it_opens_an_attempt_blames_no_request(
    w: World, its: Dispatch, adopted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does its journal grow as fast as Redis fails."""
    pauses: list[Any] = []

    def backoff(*asked: Any) -> float:
        pauses.append(asked)
        return 0.0

    monkeypatch.setattr(attempts, "backoff", backoff)
    entry = await its.claim()
    opens = its._execute

    async def execute(request_id: str, epoch: int, replica: str, cause: str) -> AttemptResult:
        if epoch > POISON_AFTER:
            return await opens(request_id, epoch, replica, cause)
        opened = AttemptFacts(f"replica-{epoch}", "e", 0, cause)
        await its._writer.open(request_id, epoch, b"%d" % epoch, opened)
        assert await w.store.void(request_id, epoch, b"%d" % epoch)
        if adopted:
            return AttemptResult(CallResult.FENCED)  # its ingress sees nothing but the journal
        raise WorkerLost("Redis was not there", Cause.NOT_OPENED)

    its.attempts._execute = execute
    running = asyncio.create_task(its.attempts.run(entry))
    opening = asyncio.create_task(its.opened.get())
    await asyncio.wait((running, opening), return_when=asyncio.FIRST_COMPLETED)
    assert not running.done(), await w.ending()
    _, attempt = opening.result()
    assert attempt.epoch == POISON_AFTER + 1
    assert pauses == [(timings.ATTEMPT_UNREAD_S, number) for number in (1, 2, 3)]
    running.cancel()


async def test_a_worker_that_hangs_under_an_adopted_request_counts_as_well(
    w: World, its: Dispatch
) -> None:
    await its.claim()
    writer = await w.writer()
    for epoch, cause in ((1, ""), (2, Cause.HUNG), (3, Cause.HUNG)):
        await writer.open("req_1", epoch, b"%d" % epoch, AttemptFacts("replica-0", "e", 0, cause))
    its.replicas.leased(REPLICAS[1:])
    (entry,) = await w.queue("ingress-2")._claim_from(w.stream("standard"), "ingress-1", 0, ())
    its.attempts._queue = w.queue("ingress-2")
    await its.attempts.run(entry)
    assert await w.ending() == ("failed", "poison")


async def test_a_request_that_ends_while_it_waits_for_its_turn_takes_no_engine(
    w: World, its: Dispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "QUARANTINE_LEASE_S", 600.0)
    async with its.attempts._quarantine.alone():
        running = asyncio.create_task(its.attempts.run(await its.claim()))
        for _ in range(POISON_AFTER - 1):
            replica, _ = await its.opened.get()
            its.hangs(replica)
        await eventually(lambda: its.attempts.stalls.keys(StallReason.TURN))
        assert await w.endings.end("req_1", Reason.DEADLINE)
    await running
    assert not its.attempts.stalls.keys(*StallReason)
    assert its.opened.empty()


async def test_a_call_whose_answer_was_lost_ends_with_its_request(
    w: World, its: Dispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CALL_OPENS_S", "CALL_LOOK_S"):
        monkeypatch.setattr(timings, name, 0.01)
    opens = its._execute

    async def execute(*asked: Any) -> AttemptResult:
        await opens(*asked)
        await asyncio.Event().wait()
        raise AssertionError

    its.attempts._execute = execute
    running = asyncio.create_task(its.attempts.run(await its.claim()))
    _, attempt = await its.opened.get()
    finish(attempt)
    assert await running == CompletionStats(0, False, True)
