"""An attempt that is not the newest, or whose request has ended, can append nothing."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.contract import Reason
from serve_app.errors import Fenced
from serve_app.journal.attempt_log import AttemptLog
from serve_app.journal.entries import TERMINAL_ID
from serve_app.requests.record import Record
from tests.journal.cable import UNANSWERED, Cable
from tests.journal.journal_helpers import OPENED, World, add, added, complete, event, finish, world
from tests.transcripts import transcript
from tests.waiting import PATIENCE_S

TERMINAL = str(TERMINAL_ID)


async def is_fenced(attempt: AttemptLog) -> None:
    """The attempt learns that it has lost its journal."""
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(Fenced):
            await attempt.closed


async def append(
    w: World, position: str, nonce: bytes = b"nonce-1", state: bytes | None = b"completed"
) -> None:
    """As if a worker had appended this, and its answer had been lost."""
    fields = {b"n": nonce, b"e": b"0"} | ({b"k": state, b"w": b""} if state else {})
    await w.redis.xadd(w.store.key("req_1"), {**fields}, id=position)


@pytest.mark.parametrize("finishing", [False, True])
async def test_a_stale_epoch_is_refused(w: World, finishing: bool) -> None:
    old = await w.started()
    new = await w.opened(await w.writer(), 2, b"nonce-2")
    if finishing:  # one that hung, and wakes with its last output
        await added(new, 1)
    add(old, 1)
    if finishing:
        finish(old)
    await is_fenced(old)
    if not finishing:
        add(new, 1)
    await complete(new)
    (entry,) = [entry for entry in await w.entries() if entry.id == TERMINAL_ID]
    assert (entry.nonce, transcript(entry)) == (b"nonce-2", event(1))


async def test_an_opening_whose_answer_was_lost_is_voided(w: World) -> None:
    await w.admit()
    assert not await w.store.void("req_1", 1, b"nonce-1"), "Redis has not taken it, and may yet"
    await w.opened(await w.writer(), 1, b"nonce-1")
    assert not await w.store.void("req_1", 1, b"nonce-2"), "somebody else's"
    assert await w.ids() == ["0-1", "1-0"]
    assert await w.store.void("req_1", 1, b"nonce-1")
    record = await w.store.record("req_1")
    assert record
    assert record.last.quit == "not_opened"
    await w.opened(await w.writer(), 2, b"nonce-2")
    assert await w.store.void("req_1", 1, b"nonce-1")
    assert await w.ids() == ["0-1", "1-0", "1-1", "2-0"]


@pytest.mark.parametrize("epoch", [1, 2])
async def test_an_epoch_that_is_taken_or_passed_cannot_be_opened(w: World, epoch: int) -> None:
    await w.admit()
    first = await w.opened(await w.writer(), 2, b"nonce-1")
    with pytest.raises(Fenced):
        await w.opened(await w.writer(), epoch, b"nonce-2")
    await complete(first)


@pytest.mark.parametrize("cut", [False, True])
async def test_an_attempt_that_appends_nothing_learns_that_its_request_has_ended(
    w: World, namespace: str, cut: bool
) -> None:
    """For example, while it waits in an engine: Redis cannot reject its appends, because it sends
    none. Nor does a connection that breaks keep it from that.
    """
    await w.admit()
    async with Cable(w.settings.redis.url) as cable, world(cable.url, namespace) as its:
        attempt, entries = await (await its.writer()).open("req_1", 1, b"nonce-1", OPENED)
        if cut:
            cable.drop()
        assert await w.endings.end("req_1", Reason.CANCELLED, Record(entries))
        await is_fenced(attempt)


async def test_what_is_worked_on_here_is_not_opened_again(w: World) -> None:
    await w.admit()
    writer = await w.writer()
    await w.opened(writer)
    with pytest.raises(Fenced, match="already worked on here"):
        await w.opened(writer)


async def test_a_journal_that_is_gone_does_not_come_back_to_life(w: World) -> None:
    attempt = await w.started()
    await w.redis.unlink(w.store.key("req_1"))
    add(attempt, 1)
    await is_fenced(attempt)
    with pytest.raises(Fenced):
        await w.opened(await w.writer())
    assert not await w.redis.exists(w.store.key("req_1"))


@pytest.mark.parametrize(
    ("position", "nonce", "state", "mine"),
    [
        ("1-1", b"nonce-2", None, False),
        ("1-2", b"nonce-1", None, False),
        (TERMINAL, b"nonce-1", b"completed", True),
        (TERMINAL, b"nonce-1", b"failed", False),
        (TERMINAL, b"nonce-2", b"completed", False),
    ],
)
async def test_a_refused_append_is_mine_by_nonce_and_kind_or_it_is_a_fence(
    w: World, position: str, nonce: bytes, state: bytes | None, mine: bool
) -> None:
    attempt = await w.started()
    await append(w, position, nonce, state)
    if state:
        finish(attempt)
    else:
        add(attempt, 1)
    await (attempt.closed if mine else is_fenced(attempt))


# -- found by the state machines -----------------------------------------------------------------


async def test_a_connection_cut_while_reading_back_leaves_no_attempt_waiting(
    w: World, namespace: str
) -> None:
    async with Cable(w.settings.redis.url) as cable, world(cable.url, namespace) as its:
        writer = await its.writer()
        fenced, _ = await writer.open(await w.admit(), 1, b"nonce-1", OPENED)
        whole, _ = await writer.open(await w.admit("req_2"), 1, b"nonce-2", OPENED)
        assert await w.endings.end("req_1", Reason.CANCELLED)
        cable.cut("XRANGE", UNANSWERED)
        # One flush: what Redis accepted of it is not known before the other is.
        for attempt in (fenced, whole):
            add(attempt, 1)
            finish(attempt)
        await is_fenced(fenced)
        async with asyncio.timeout(PATIENCE_S):
            await whole.closed
