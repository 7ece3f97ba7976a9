"""A request's body is stored apart from its state: only the worker reads it, and it is deleted with
the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from serve_app.contract import AttemptResult, CallResult, Reason, State, WorkerLost
from serve_app.journal.entries import MAX_ID_PART, TERMINAL_ID, AttemptFacts, Entry
from serve_app.journal.reader import read_whole
from serve_app.requests.dead_letters import DeadLetter
from tests.journal.admitting import StillIngress
from tests.journal.in_process import calling, worker_process
from tests.journal.journal_helpers import (
    HEAD,
    SUMMARY,
    World,
    add,
    complete,
    event,
)
from tests.waiting import eventually

BIG = b"x" * (1 << 20)
POISON_AFTER = 2


@pytest.fixture
def sections() -> dict[str, Any]:
    return {"engine": {"kind": "simulated"}, "queue": {"max_engine_deaths": POISON_AFTER}}


async def sent_bytes(w: World) -> int:
    """Bytes that Redis has sent to its clients so far."""
    return int((await w.redis.info("stats"))["total_net_output_bytes"])


def ids(entries: Sequence[Entry] | None) -> list[str]:
    return [str(entry.id) for entry in entries or ()]


async def body_is_there(w: World) -> bool:
    return bool(await w.redis.exists(w.store.body_key("req_1")))


async def test_a_record_is_read_without_the_body_and_without_what_was_answered(w: World) -> None:
    attempt = await w.started(body=BIG)
    before = await sent_bytes(w)
    attempt.append([], [BIG], 1)
    await eventually(lambda: not attempt.pending)
    for _ in range(10):
        record = await w.store.record("req_1")
        assert record
        assert ids(record.entries) == ["0-1", "1-0", "1-1"]
        assert (record.events, record.state, record.attempts) == (1, "running", 1)
    await complete(attempt)
    record = await w.store.record("req_1")
    assert record
    assert (record.events, record.state, record.attempts) == (1, "completed", 1)
    assert await sent_bytes(w) - before < len(BIG) / 2


@pytest.mark.parametrize("outside", [False, True])
async def test_a_record_has_every_opening_and_the_last_entry_that_counts(
    w: World, outside: bool
) -> None:
    await w.admit(body=BIG)
    for epoch in (1, 2, 4):
        attempt = await w.opened(await w.writer(), epoch, b"nonce-%d" % epoch)
        for number in range(1, 4 if epoch < 4 else 1):
            attempt.append([], [b"%d" % number], 0)
            await eventually(lambda: not attempt.pending)  # noqa: B023
    if outside:
        assert await w.endings.end("req_1", Reason.CANCELLED)
    record = await w.store.record("req_1")
    assert record
    end = [str(TERMINAL_ID)] * outside
    assert ids(record.entries) == ["0-1", "1-0", "2-0", "2-3", "4-0", *end]
    assert (record.ended, record.attempts, len(record.openings)) == (outside, 4, 3)


async def test_what_is_no_journal_has_no_record_and_hides_no_others(w: World) -> None:
    await w.redis.set(w.store.key("req_1"), "not a stream")
    await w.admit("req_2")
    none, also_none, there = await w.store.records(["req_1", "req_3", "req_2"])
    assert (none, also_none) == (None, None)
    assert there


async def test_the_record_of_a_compacted_journal(w: World) -> None:
    attempt = await w.started(body=BIG)
    attempt.append([], [BIG], 1)
    await complete(attempt)
    await eventually(lambda: w.compacted())
    record = await w.store.record("req_1")
    assert record
    (last,) = record.entries
    assert (last.state, last.events, b"z" in last.fields) == ("completed", 1, False)
    assert record.summary == SUMMARY
    assert record.facts == SUMMARY.request


async def test_the_journal_of_an_earlier_version_is_read(w: World) -> None:
    """Its last output had the id k-max and the end's fields."""
    await w.started()
    end = {"n": "nonce-1", "e": "1", "u": "7 0 1 0 0", "k": "failed", "w": "engine_error"}
    summary, head = msgspec.json.encode(SUMMARY), msgspec.json.encode(HEAD)
    last = f"1-{MAX_ID_PART}"
    await w.redis.xadd(
        w.store.key("req_1"), {**end, "m": summary, "h": head, "b": event(1), "p": "1-0"}, id=last
    )
    await w.redis.xadd(w.store.key("req_1"), {**end, "m": summary, "p": last}, id=str(TERMINAL_ID))
    record = await w.store.record("req_1")
    assert record
    assert (record.state, record.events, record.attempts) == ("failed", 1, 1)
    assert record.used == (7, 0, 1, 0, 0)
    reader, body = read_whole(await w.entries())
    assert body == event(1)
    assert reader.ending
    assert (reader.ending.state, reader.ending.reason) == ("failed", "engine_error")


async def test_a_body_that_nobody_ends_expires_with_its_journal(w: World) -> None:
    await w.admit(timeout_s=60)
    for key in (w.store.body_key("req_1"), w.store.key("req_1")):
        ends_s = 60 + w.settings.journal.retention_s
        assert 60_000 < await w.redis.pttl(key) <= 1000 * ends_s


@pytest.mark.parametrize("end", [None, State.COMPLETED, State.FAILED])
async def test_a_body_leaves_with_the_end_of_its_request(w: World, end: State | None) -> None:
    await w.admit(body=BIG)
    if end is None:
        assert await w.endings.end("req_1", Reason.CANCELLED)
        assert not await body_is_there(w)
        return
    (entry,) = await w.queue().claim(1)
    attempt = await w.opened(await w.writer())
    add(attempt, 1)
    attempt.stop(end, None, SUMMARY, 1 if end is State.COMPLETED else None)
    await attempt.closed
    await w.queue().acknowledge(entry)
    assert not await body_is_there(w)
    assert await w.redis.exists(w.store.key("req_1"))


async def test_a_request_whose_body_redis_has_lost_ends_with_that_reason_and_never_without_a_prompt(
    w: World,
) -> None:
    await w.admit(body=BIG)
    await w.redis.unlink(w.store.body_key("req_1"))
    async with worker_process(w.settings) as worker:
        assert (await calling(worker)("req_1", 1, "s", "")).outcome is CallResult.ENDED
    assert await w.ending() == ("failed", "journal_lost")


@pytest.mark.parametrize("full", [False, True])
async def test_a_dead_letter_keeps_the_body_whole_unless_redis_is_full(
    w: World, full: bool
) -> None:
    """If Redis is full, the request ends without a dead letter, because its end frees memory."""
    await w.admit(body=BIG)
    async with AsyncExitStack() as stack:

        async def execute(request_id: str, epoch: int, replica: str, cause: str) -> AttemptResult:
            opened = AttemptFacts("replica-1", "engine-1", 5, cause)
            await (await w.writer()).open(request_id, epoch, b"n%d" % epoch, opened)
            if full and epoch == POISON_AFTER:
                await stack.enter_async_context(w.full(over_bytes=len(BIG) // 2))
            raise WorkerLost("it died")

        its = StillIngress(w.settings, execute=execute)
        stack.push_async_callback(its.close)
        (entry,) = await its.queue.claim(1)
        await its.attempts.run(entry)
        letters = [one async for one in its._dead.each()]
    kept = [(BIG, Reason.POISON, POISON_AFTER)] * (not full)
    assert [
        (one.body, one.reason, one.attempts) for one in letters if isinstance(one, DeadLetter)
    ] == kept
    assert await w.ending() == ("failed", "poison")
    assert not await body_is_there(w)
