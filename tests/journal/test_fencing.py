"""An attempt that is not the newest, or whose request has ended, can append nothing."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.contract import Reason, State
from serve_app.errors import Fenced
from serve_app.journal.entries import decode_facts, has_ended, transcript
from serve_app.journal.facts import AttemptFacts
from serve_app.journal.ids import TERMINAL_ID, seal_id
from serve_app.journal.reader import JournalReader
from tests.journal.cable import Cable
from tests.journal.journal_helpers import OPENED, World, add, event, finish, world
from tests.waiting import PATIENCE_S, eventually

TERMINAL = str(TERMINAL_ID)
SEAL = str(seal_id(1))


async def test_a_stale_epoch_is_refused(w: World) -> None:
    await w.admit()
    old = await w.opened(await w.writer(), 1, b"nonce-1")
    new = await w.opened(await w.writer(), 2, b"nonce-2")
    add(old, 1)
    with pytest.raises(Fenced):
        await old.closed
    add(new, 1)
    finish(new)
    await new.closed
    (entry,) = [entry for entry in await w.entries() if entry.id == TERMINAL_ID]
    assert (entry.nonce, transcript(entry)) == (b"nonce-2", event(1))


async def test_an_opening_whose_answer_was_lost_is_voided(w: World) -> None:
    await w.admit()
    assert not await w.store.void("req_1", 1, b"nonce-1"), "Redis has not taken it, and may yet"
    await w.opened(await w.writer(), 1, b"nonce-1")
    assert not await w.store.void("req_1", 1, b"nonce-2"), "somebody else's"
    assert await w.ids() == ["0-1", "1-0"]
    assert await w.store.void("req_1", 1, b"nonce-1")
    (found,) = await w.store.read_tails(["req_1"])
    assert found is not None
    assert found[-1].quit == "not_opened"
    await w.opened(await w.writer(), 2, b"nonce-2")
    assert await w.store.void("req_1", 1, b"nonce-1")
    assert await w.ids() == ["0-1", "1-0", "1-1", "2-0"]


async def test_a_stale_epoch_cannot_end_the_request(w: World) -> None:
    await w.admit()
    old = await w.opened(await w.writer(), 1, b"nonce-1")
    new = await w.opened(await w.writer(), 2, b"nonce-2")
    add(new, 1)
    await eventually(lambda: not new.pending)
    add(old, 1)
    finish(old)  # one that hung, and wakes with its last output
    with pytest.raises(Fenced):
        await old.closed


@pytest.mark.parametrize("epoch", [1, 2])
async def test_an_epoch_that_is_taken_or_passed_cannot_be_opened(w: World, epoch: int) -> None:
    await w.admit()
    first = await w.opened(await w.writer(), 2, b"nonce-1")
    other = await w.writer()
    with pytest.raises(Fenced):
        await w.opened(other, epoch, b"nonce-2")
    add(first, 1)
    finish(first)
    await first.closed


async def test_an_attempt_that_appends_nothing_learns_that_its_request_has_ended(w: World) -> None:
    """For example, while it waits in an engine: Redis cannot reject its appends, because it sends
    none.
    """
    await w.admit()
    attempt, entries = await (await w.writer()).open("req_1", 1, b"nonce-1", OPENED)
    assert await w.store.end("req_1", State.CANCELLED, Reason.CANCELLED, entries)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(Fenced):
            await attempt.closed


async def test_an_attempt_that_appends_nothing_learns_of_its_end_after_its_connection_broke(
    redis_url: str, namespace: str
) -> None:
    cable = Cable(redis_url)
    await cable.start()
    async with world(cable.url, namespace) as w, world(redis_url, namespace) as beside:
        await beside.admit()
        attempt, entries = await (await w.writer()).open("req_1", 1, b"nonce-1", OPENED)
        cable.drop()
        assert await beside.store.end("req_1", State.CANCELLED, Reason.CANCELLED, entries)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(Fenced):
                await attempt.closed
    cable.drop()


async def test_an_attempt_that_appends_nothing_and_was_not_ended_is_left_alone(w: World) -> None:
    attempt = await w.started()
    add(attempt, 1)
    await asyncio.sleep(2.5)  # longer than two looks
    add(attempt, 2)
    finish(attempt)
    await attempt.closed


async def test_opening_gives_the_journal_as_it_stands(w: World) -> None:
    await w.admit()
    writer = await w.writer()
    attempt, entries = await writer.open("req_1", 1, b"nonce-1", OPENED)
    assert [str(entry.id) for entry in entries] == ["0-1", "1-0"]
    assert entries[0].body == b"{}"
    assert decode_facts(entries[1], AttemptFacts) == OPENED
    assert attempt.channel == w.channel
    with pytest.raises(Fenced, match="already worked on here"):
        await writer.open("req_1", 1, b"nonce-1", OPENED)


async def test_a_journal_that_is_gone_cannot_be_opened_and_does_not_come_back_to_life(
    w: World,
) -> None:
    with pytest.raises(Fenced):
        await w.opened(await w.writer())
    assert not await w.redis.exists(w.store.key("req_1"))


async def test_a_journal_that_expires_under_an_attempt_fences_it(w: World) -> None:
    attempt = await w.started()
    await w.redis.delete(w.store.key("req_1"))
    add(attempt, 1)
    with pytest.raises(Fenced):
        await attempt.closed
    assert not await w.redis.exists(w.store.key("req_1"))


async def test_a_retry_of_ones_own_append_counts_as_accepted(w: World) -> None:
    attempt = await w.started()
    # As if the first try had been carried out and its answer lost.
    await w.redis.xadd(w.store.key("req_1"), {b"n": b"nonce-1", b"b": event(1), b"e": 1}, id="1-1")
    add(attempt, 1)
    await eventually(lambda: not attempt.pending)
    add(attempt, 2)
    await eventually(lambda: not attempt.pending)
    assert await w.ids() == ["0-1", "1-0", "1-1", "1-2"]
    finish(attempt)
    await attempt.closed


@pytest.mark.parametrize(
    ("position", "nonce", "state", "mine"),
    [
        ("1-1", b"nonce-2", None, False),
        ("1-2", b"nonce-1", None, False),
        (SEAL, b"nonce-1", b"completed", True),
        (SEAL, b"nonce-1", b"failed", False),
        (SEAL, b"nonce-2", b"completed", False),
        (TERMINAL, b"nonce-2", b"completed", False),
    ],
)
async def test_a_refused_append_is_mine_by_nonce_and_kind_or_it_is_a_fence(
    w: World, position: str, nonce: bytes, state: bytes | None, mine: bool
) -> None:
    attempt = await w.started()
    fields = {b"n": nonce, b"e": b"0"} | ({b"k": state} if state else {})
    await w.redis.xadd(w.store.key("req_1"), {**fields}, id=position)
    if state:
        finish(attempt)
    else:
        add(attempt, 1)
    if mine:
        await attempt.closed
    else:
        with pytest.raises(Fenced):
            await attempt.closed


async def test_an_ending_that_comes_after_a_workers_seal_does_not_count(w: World) -> None:
    await w.admit()
    before = await w.entries()
    seal = {b"n": b"nonce-1", b"e": b"0", b"k": b"completed", b"w": b""}
    await w.redis.xadd(w.store.key("req_1"), {**seal}, id=SEAL)
    assert not await w.store.end("req_1", State.CANCELLED, Reason.CANCELLED, before)
    reader = JournalReader()
    for entry in await w.entries():
        reader.feed(entry)
    assert reader.ending is not None
    assert reader.ending.state == "completed"


async def test_a_sealed_request_stays_ended_although_a_newer_epoch_was_opened(w: World) -> None:
    await w.admit()
    old = await w.opened(await w.writer(), 1, b"nonce-1")
    await w.redis.xadd(
        w.store.key("req_1"), {b"n": b"nonce-1", b"e": b"0", b"k": b"completed"}, id=SEAL
    )
    other = await w.writer()
    _, entries = await other.open("req_1", 2, b"nonce-2", OPENED)
    assert has_ended(entries)
    finish(old)  # finds its own seal and closes the journal behind it
    await old.closed
    assert (await w.entries())[-1].id == TERMINAL_ID


async def test_cancelling_from_outside_fences_the_writer(w: World) -> None:
    attempt = await w.started()

    async def write() -> None:
        number = 0
        while not attempt.closed.done():
            number += 1
            add(attempt, number)
            await asyncio.sleep(0)

    writing = asyncio.create_task(write())
    await eventually(lambda: len(attempt.history) > 3)
    assert await w.store.end("req_1", State.CANCELLED, Reason.CANCELLED, await w.entries())
    with pytest.raises(Fenced):
        await attempt.closed
    await writing
    *_, last, terminal = await w.entries()
    assert (terminal.id, terminal.state, terminal.reason) == (
        TERMINAL_ID,
        "cancelled",
        "cancelled",
    )
    assert last.id.epoch == 1  # what had been written stays
    assert not await w.store.end("req_1", State.CANCELLED, Reason.CANCELLED, [])
