"""Cases that the state machines have found, each as a test of its own."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.contract import Cause, Reason, State
from serve_app.errors import Fenced
from serve_app.journal.ids import seal_id
from serve_app.journal.writer import JournalWriter
from tests.journal.cable import UNANSWERED, Cable, settings_behind
from tests.journal.journal_helpers import OPENED, World, add, finish
from tests.waiting import PATIENCE_S


async def test_a_connection_cut_while_reading_back_leaves_no_attempt_waiting(
    w: World, redis_url: str, namespace: str
) -> None:
    async with asyncio.timeout(PATIENCE_S):
        cable = Cable(redis_url)
        await cable.start()
        writer = JournalWriter(settings_behind(cable, namespace))
        await writer.start()
        before = await w.admit()
        fenced, _ = await writer.open(before, 1, b"nonce-1", OPENED)
        whole, _ = await writer.open(await w.admit("req_2"), 1, b"nonce-2", OPENED)
        assert await w.store.end(before, State.CANCELLED, Reason.CANCELLED, await w.entries())
        cable.cut("XRANGE", UNANSWERED)
        for attempt in (
            fenced,
            whole,
        ):  # one flush: what Redis accepted of it is not known before the other is
            add(attempt, 1)
            finish(attempt)
        with pytest.raises(Fenced):
            await fenced.closed
        await whole.closed
        await writer.stop()


async def test_an_attempt_that_quits_without_an_answer_is_released(
    w: World, redis_url: str, namespace: str
) -> None:
    async with asyncio.timeout(PATIENCE_S):
        cable = Cable(redis_url)
        await cable.start()
        writer = JournalWriter(settings_behind(cable, namespace))
        await writer.start()
        attempt, _ = await writer.open(await w.admit(), 1, b"nonce-1", OPENED)
        cable.cut("XADD", UNANSWERED)
        attempt.quit(Cause.ENGINE_FAILED)
        with pytest.raises(Fenced):
            await attempt.closed
        await writer.stop()


async def test_a_journal_that_was_compacted_cannot_be_ended_again(w: World) -> None:
    attempt, _ = await (await w.writer()).open(await w.admit(), 1, b"nonce-1", OPENED)
    add(attempt, 1)
    finish(attempt)
    await attempt.closed
    while len(entries := await w.entries()) > 1:
        await asyncio.sleep(0)
    assert not await w.store.end("req_1", State.EXPIRED, Reason.DEADLINE, entries)


async def test_an_ending_does_not_count_although_the_seal_before_it_is_not_the_last(
    w: World,
) -> None:
    await w.admit()
    before = await w.entries()
    seal = {b"n": b"nonce-1", b"e": b"0", b"k": b"completed", b"w": b""}
    await w.redis.xadd(w.store.key("req_1"), {**seal}, id=str(seal_id(1)))
    await w.opened(await w.writer(), 2, b"nonce-2")  # by who finds it ended
    assert not await w.store.end("req_1", State.CANCELLED, Reason.CANCELLED, before)
