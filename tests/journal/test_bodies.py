"""A request's body is stored apart from its state: only the worker reads it, and it is deleted with
the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from serve_app.contract import AttemptResult, CallResult, Reason, State, WorkerLost
from serve_app.journal.entries import Entry, decode_facts, has_ended
from serve_app.journal.facts import AttemptFacts, Summary
from serve_app.journal.ids import seal_id
from serve_app.request_queue.dead_letters import DeadLetter
from tests.journal.admitting import StillIngress
from tests.journal.in_process import calling, worker_process
from tests.journal.journal_helpers import (
    SUMMARY,
    World,
    add,
    added,
    complete,
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


async def test_a_state_is_read_without_the_body_and_without_what_was_answered(w: World) -> None:
    attempt = await w.started(body=BIG)
    before = await sent_bytes(w)
    for _ in range(10):
        assert ids(await w.store.outline("req_1")) == ["0-1", "1-0"]
    attempt.append([], [BIG], 1)
    await eventually(lambda: not attempt.pending)
    await added(attempt, 2)
    found = await w.store.outline("req_1")
    assert found is not None
    assert ids(found) == ["0-1", "1-0", "1-1", "1-2"]
    assert not any(entry.body for entry in found)
    assert found[-1].events == 2
    assert await sent_bytes(w) - before < len(BIG) * 1.1, "of the last two entries, no more"


@pytest.mark.parametrize("sealed", [0, 1, 2])
async def test_an_outline_has_every_opening_and_every_seal(w: World, sealed: int) -> None:
    await w.admit(body=BIG)
    for epoch in (1, 2, 3):
        attempt = await w.opened(await w.writer(), epoch, b"nonce-%d" % epoch)
        for number in range(1, 4):
            attempt.append([], [b"%d" % number], 0)
            await eventually(lambda: not attempt.pending)  # noqa: B023
        if epoch == sealed:
            seal = {b"n": b"nonce-%d" % epoch, b"e": b"3", b"k": b"completed", b"w": b""}
            await w.redis.xadd(w.store.key("req_1"), {**seal}, id=str(seal_id(epoch)))
    found = await w.store.outline("req_1")
    assert found is not None
    assert has_ended(found) == bool(sealed)
    seals = [str(seal_id(sealed))] * bool(sealed)
    openings = ["1-0", "2-0", "3-0"]
    assert [name for name in ids(found) if name not in seals] == ["0-1", *openings, "3-2", "3-3"]
    assert [name for name in ids(found) if name in seals] == seals


async def test_the_outline_of_a_journal_that_is_gone_or_compacted(w: World) -> None:
    assert await w.store.outline("req_1") is None
    attempt = await w.started(body=BIG)
    attempt.append([], [BIG], 1)
    await complete(attempt)
    await eventually(lambda: w.compacted())
    (last,) = await w.store.outline("req_1") or []
    assert (last.state, last.events, b"z" in last.fields) == ("completed", 1, False)
    assert decode_facts(last, Summary) == SUMMARY


async def test_a_body_that_nobody_ends_expires_with_its_journal(w: World) -> None:
    await w.admit(timeout_s=60)
    for key in (w.store.body_key("req_1"), w.store.key("req_1")):
        ends_s = 60 + w.settings.journal.retention_s
        assert 60_000 < await w.redis.pttl(key) <= 1000 * ends_s


@pytest.mark.parametrize("end", [None, State.COMPLETED, State.FAILED])
async def test_a_body_leaves_with_the_end_of_its_request(w: World, end: State | None) -> None:
    await w.admit(body=BIG)
    if end is None:
        assert await w.endings.end("req_1", State.CANCELLED, Reason.CANCELLED)
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
