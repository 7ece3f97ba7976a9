"""Fenced appends, the end of a request, group commit and wake-ups, on a real Redis."""

from __future__ import annotations

import asyncio
import time

import pytest
from journal_helpers import HEAD, OPENED, SUMMARY, World, add, event, events, eventually, finish, world
from redis.exceptions import ResponseError

from serve_app.errors import Fenced, JournalUnavailable, Reason
from serve_app.journal.entries import (
    TERMINAL_ID,
    AttemptFacts,
    decode_facts,
    decode_wakes,
    has_ended,
    seal_id,
    transcript,
)
from serve_app.journal.reader import JournalReader

TERMINAL = str(TERMINAL_ID)
SEAL = str(seal_id(1))


# -- fencing -------------------------------------------------------------------------------------------------


def test_a_stale_epoch_is_refused(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
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

    asyncio.run(main())


def test_an_opening_whose_answer_was_lost_is_disowned_so_that_nobody_waits_for_it(
    redis_url: str, namespace: str
) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            await w.admit()
            assert not await w.store.disown("req_1", 1, b"nonce-1"), "Redis has not taken it, and may yet"
            await w.opened(await w.writer(), 1, b"nonce-1")
            assert not await w.store.disown("req_1", 1, b"nonce-2"), "somebody else's"
            assert await w.ids() == ["0-1", "1-0"]
            assert await w.store.disown("req_1", 1, b"nonce-1")
            (found,) = await w.store.read_tails(["req_1"])
            assert found is not None
            assert found[-1].quit == "not_opened"
            await w.opened(await w.writer(), 2, b"nonce-2")
            assert await w.store.disown("req_1", 1, b"nonce-1")
            assert await w.ids() == ["0-1", "1-0", "1-1", "2-0"]

    asyncio.run(main())


def test_a_stale_epoch_cannot_end_the_request(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            await w.admit()
            old = await w.opened(await w.writer(), 1, b"nonce-1")
            new = await w.opened(await w.writer(), 2, b"nonce-2")
            add(new, 1)
            await eventually(lambda: not new.pending)
            add(old, 1)
            finish(old)  # one that hung, and wakes with its last output
            with pytest.raises(Fenced):
                await old.closed

    asyncio.run(main())


@pytest.mark.parametrize("epoch", [1, 2])
def test_an_epoch_that_is_taken_or_passed_cannot_be_opened(redis_url: str, namespace: str, epoch: int) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            await w.admit()
            first = await w.opened(await w.writer(), 2, b"nonce-1")
            other = await w.writer()
            with pytest.raises(Fenced):
                await w.opened(other, epoch, b"nonce-2")
            add(first, 1)
            finish(first)
            await first.closed

    asyncio.run(main())


def test_an_attempt_that_appends_nothing_learns_that_its_request_has_ended(redis_url: str, namespace: str) -> None:
    """As while it waits inside of an engine: nothing of it is refused, since it sends nothing."""

    async def main() -> None:
        async with world(redis_url, namespace) as w:
            await w.admit()
            attempt, entries = await (await w.writer()).open("req_1", 1, b"nonce-1", OPENED)
            assert await w.store.end("req_1", "cancelled", Reason.CANCELLED, entries)
            async with asyncio.timeout(5):
                with pytest.raises(Fenced):
                    await attempt.closed

    asyncio.run(main())


def test_an_attempt_that_appends_nothing_and_was_not_ended_is_left_alone(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            await w.admit()
            attempt = await w.opened(await w.writer())
            add(attempt, 1)
            await asyncio.sleep(2.5)  # longer than two looks
            add(attempt, 2)
            finish(attempt)
            await attempt.closed

    asyncio.run(main())


def test_opening_gives_the_journal_as_it_stands(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            await w.admit()
            writer = await w.writer()
            attempt, entries = await writer.open("req_1", 1, b"nonce-1", OPENED)
            assert [str(entry.id) for entry in entries] == ["0-1", "1-0"]
            assert entries[0].body == b"{}"
            assert decode_facts(entries[1], AttemptFacts) == OPENED
            assert attempt.channel == w.channel
            with pytest.raises(Fenced, match="already worked on here"):
                await writer.open("req_1", 1, b"nonce-1", OPENED)

    asyncio.run(main())


def test_a_journal_that_is_gone_cannot_be_opened_and_does_not_come_back_to_life(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            with pytest.raises(Fenced):
                await w.opened(await w.writer())
            assert not await w.redis.exists(w.store.key("req_1"))

    asyncio.run(main())


def test_a_journal_that_expires_under_an_attempt_fences_it(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            await w.admit()
            attempt = await w.opened(await w.writer())
            await w.redis.delete(w.store.key("req_1"))
            add(attempt, 1)
            with pytest.raises(Fenced):
                await attempt.closed
            assert not await w.redis.exists(w.store.key("req_1"))

    asyncio.run(main())


def test_a_retry_of_ones_own_append_counts_as_accepted(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            await w.admit()
            attempt = await w.opened(await w.writer())
            # As if the first try had been carried out and its answer lost.
            await w.redis.xadd(w.store.key("req_1"), {b"n": b"nonce-1", b"b": event(1), b"e": 1}, id="1-1")
            add(attempt, 1)
            await eventually(lambda: not attempt.pending)
            add(attempt, 2)
            await eventually(lambda: not attempt.pending)
            assert await w.ids() == ["0-1", "1-0", "1-1", "1-2"]
            finish(attempt)
            await attempt.closed

    asyncio.run(main())


@pytest.mark.parametrize(("position", "nonce", "state", "mine"), [
    ("1-1", b"nonce-2", None, False),
    ("1-2", b"nonce-1", None, False),
    (SEAL, b"nonce-1", b"completed", True),
    (SEAL, b"nonce-1", b"failed", False),
    (SEAL, b"nonce-2", b"completed", False),
    (TERMINAL, b"nonce-2", b"completed", False),
])  # fmt: skip
def test_a_refused_append_is_mine_by_nonce_and_kind_or_it_is_a_fence(
    redis_url: str, namespace: str, position: str, nonce: bytes, state: bytes | None, mine: bool
) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            await w.admit()
            attempt = await w.opened(await w.writer())
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

    asyncio.run(main())


def test_an_ending_that_comes_after_a_workers_seal_does_not_count(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            await w.admit()
            before = await w.entries()
            seal = {b"n": b"nonce-1", b"e": b"0", b"k": b"completed", b"w": b""}
            await w.redis.xadd(w.store.key("req_1"), {**seal}, id=SEAL)
            assert not await w.store.end("req_1", "cancelled", Reason.CANCELLED, before)
            reader = JournalReader()
            for entry in await w.entries():
                reader.feed(entry)
            assert reader.ending is not None
            assert reader.ending.state == "completed"

    asyncio.run(main())


def test_a_sealed_request_stays_ended_although_a_newer_epoch_was_opened(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            await w.admit()
            old = await w.opened(await w.writer(), 1, b"nonce-1")
            await w.redis.xadd(w.store.key("req_1"), {b"n": b"nonce-1", b"e": b"0", b"k": b"completed"}, id=SEAL)
            other = await w.writer()
            _, entries = await other.open("req_1", 2, b"nonce-2", OPENED)
            assert has_ended(entries)
            finish(old)  # finds its own seal and closes the journal behind it
            await old.closed
            assert (await w.entries())[-1].id == TERMINAL_ID

    asyncio.run(main())


def test_cancelling_from_outside_fences_the_writer(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            await w.admit()
            attempt = await w.opened(await w.writer())

            async def write() -> None:
                number = 0
                while not attempt.closed.done():
                    number += 1
                    add(attempt, number)
                    await asyncio.sleep(0)

            writing = asyncio.create_task(write())
            await eventually(lambda: len(attempt.history) > 3)
            assert await w.store.end("req_1", "cancelled", Reason.CANCELLED, await w.entries())
            with pytest.raises(Fenced):
                await attempt.closed
            await writing
            *_, last, terminal = await w.entries()
            assert (terminal.id, terminal.state, terminal.reason) == (TERMINAL_ID, "cancelled", "cancelled")
            assert last.id.epoch == 1  # what had been written stays
            assert not await w.store.end("req_1", "cancelled", Reason.CANCELLED, [])

    asyncio.run(main())


# -- the end -------------------------------------------------------------------------------------------------


def test_nothing_can_follow_the_terminal_entry(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            await w.admit()
            attempt = await w.opened(await w.writer())
            add(attempt, 1)
            finish(attempt)
            await attempt.closed
            for entry_id in ("*", "2-0", "99999999999999-1", TERMINAL):
                with pytest.raises(ResponseError, match="exhausted"):
                    await w.redis.xadd(w.store.key("req_1"), {"a": "b"}, id=entry_id)
            with pytest.raises(Fenced):
                await w.opened(await w.writer(), 2, b"nonce-2")
            assert not await w.store.end("req_1", "cancelled", Reason.CANCELLED, [])

    asyncio.run(main())


def test_a_completed_journal_is_one_terminal_entry_that_holds_the_transcript(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace, journal={"retention_s": 30}) as w:
            await w.admit()
            attempt = await w.opened(await w.writer())
            for number in range(1, 21):
                add(attempt, number)
                await eventually(lambda: not attempt.pending)
            assert len(await w.entries()) == 22
            finish(attempt)
            await attempt.closed
            (terminal,) = await eventually(lambda: _compacted(w))
            assert terminal.id == TERMINAL_ID
            assert transcript(terminal) == events(1, 20)
            assert (terminal.state, terminal.events, terminal.head) == ("completed", 20, HEAD)
            assert terminal.fields[b"p"] == SEAL.encode()
            assert 0 < await w.redis.pttl(w.store.key("req_1")) <= 30_000

    asyncio.run(main())


async def _compacted(w: World) -> object:
    entries = await w.entries()
    return len(entries) == 1 and 0 < await w.redis.pttl(w.store.key("req_1")) <= 30_000 and entries


@pytest.mark.parametrize("outside", [True, False])
def test_a_journal_that_failed_or_was_cancelled_keeps_its_entries(
    redis_url: str, namespace: str, outside: bool
) -> None:
    async def main() -> None:
        async with world(redis_url, namespace, journal={"retention_s": 30}) as w:
            await w.admit()
            attempt = await w.opened(await w.writer())
            add(attempt, 1)
            await eventually(lambda: not attempt.pending)
            if outside:
                await w.store.end("req_1", "cancelled", Reason.CANCELLED, await w.entries())
            else:
                attempt.finish("failed", Reason.ENGINE_ERROR, SUMMARY, None)
                await attempt.closed
            await eventually(lambda: _expires_soon(w))
            assert await w.ids() == ["0-1", "1-0", "1-1", *([] if outside else [SEAL]), TERMINAL]
            assert transcript((await w.entries())[-1]) is None

    asyncio.run(main())


async def _expires_soon(w: World) -> bool:
    return bool(0 < await w.redis.pttl(w.store.key("req_1")) <= 30_000)


def test_appends_keep_the_expiry_that_was_set_at_admission(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace, journal={"retention_s": 30}) as w:
            await w.admit()
            admitted_ms = await w.redis.pttl(w.store.key("req_1"))
            assert 60_000 < admitted_ms <= 60_000 + 300_000, "its deadline, and time for somebody to end it"
            attempt = await w.opened(await w.writer())
            add(attempt, 1)
            await eventually(lambda: not attempt.pending)
            assert 0 < await w.redis.pttl(w.store.key("req_1")) <= admitted_ms

    asyncio.run(main())


# -- group commit and wake-ups -------------------------------------------------------------------------------


def test_what_comes_while_a_flush_is_underway_rides_in_the_next_as_one_entry(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            await w.admit()
            attempt = await w.opened(await w.writer())
            await w.operator.config_resetstat()
            await w.operator.execute_command("CLIENT", "PAUSE", 20_000, "WRITE")
            add(attempt, 1)
            await eventually(lambda: attempt.unaccepted)
            for number in range(2, 51):
                add(attempt, number)
                await asyncio.sleep(0)  # the writer could send more, and must not
            await w.operator.execute_command("CLIENT", "UNPAUSE")
            await eventually(lambda: not attempt.pending)
            _, _, first, second = await w.entries()
            assert (first.body, second.body) == (event(1), events(2, 50))
            assert second.events == 50
            stats = await w.redis.info("commandstats")
            assert stats["cmdstat_xadd"]["calls"] == 2

    asyncio.run(main())


def test_many_journals_share_a_flush(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            writer = await w.writer()
            attempts = []
            for number in range(20):
                request_id = await w.admit(f"req_{number}")
                attempt, _ = await writer.open(request_id, 1, b"n%d" % number, OPENED)
                attempts.append(attempt)
            for attempt in attempts:
                add(attempt, 1)
                finish(attempt)
            await asyncio.gather(*(attempt.closed for attempt in attempts))
            for number in range(20):
                assert transcript((await w.entries(f"req_{number}"))[-1]) == event(1)

    asyncio.run(main())


def test_a_wake_up_is_published_only_for_what_stands_in_the_journal(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            await w.admit()
            pubsub = w.redis.pubsub(ignore_subscribe_messages=True)
            await pubsub.subscribe(w.channel)
            await eventually(lambda: w.subscribers())
            old = await w.opened(await w.writer(), 1, b"nonce-1")
            add(old, 1)
            await eventually(lambda: not old.pending)
            new = await w.opened(await w.writer(), 2, b"nonce-2")
            old.append([], [b"id: 2\ndata: refused\n\n"], 2)
            with pytest.raises(Fenced):
                await old.closed
            add(new, 1)
            finish(new)
            await new.closed
            told = []
            while not told or told[-1] != seal_id(2):
                message = await pubsub.get_message(timeout=5)
                if message:
                    standing = {entry.id for entry in await w.entries()}
                    for request_id, entry in decode_wakes(message["data"]):
                        assert request_id == "req_1"
                        assert entry.id in standing or TERMINAL_ID in standing
                        assert b"refused" not in entry.body
                        told.append(entry.id)
            assert [entry_id for entry_id in told if entry_id != (2, 1)] == [(1, 0), (1, 1), (2, 0), seal_id(2)]
            await pubsub.aclose()

    asyncio.run(main())


# -- a Redis that cannot take it -----------------------------------------------------------------------------


def test_appends_wait_while_redis_is_out_of_memory(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            await w.admit()
            writer = await w.writer()
            attempt = await w.opened(writer)
            await w.operator.config_resetstat()
            await w.operator.config_set("maxmemory", 1)
            try:
                add(attempt, 1)
                await eventually(lambda: _refused_for_memory(w))
                add(attempt, 2)
                finish(attempt)
                with pytest.raises(JournalUnavailable):
                    await w.admit("req_2")
                assert not await w.redis.exists(w.store.key("req_2"))
            finally:
                await w.operator.config_set("maxmemory", 0)
            await attempt.closed
            assert transcript((await w.entries())[-1]) == events(1, 2)
            assert await w.redis.xlen(w.queue().stream("standard")) == 1

    asyncio.run(main())


async def _refused_for_memory(w: World) -> bool:
    return "errorstat_OOM" in await w.redis.info("errorstats")


def test_opening_while_redis_is_out_of_memory_is_no_fence(redis_url: str, namespace: str) -> None:
    async def main() -> None:
        async with world(redis_url, namespace) as w:
            await w.admit()
            writer = await w.writer()
            await w.operator.config_set("maxmemory", 1)
            try:
                with pytest.raises(JournalUnavailable, match="OOM"):
                    await w.opened(writer)
            finally:
                await w.operator.config_set("maxmemory", 0)
            await w.opened(writer)

    asyncio.run(main())


def test_a_redis_that_is_away_is_one_exception_everywhere(namespace: str) -> None:
    async def main() -> None:
        async with world("redis://127.0.0.1:1/0", namespace) as w:
            writer = await w.writer()
            began = time.monotonic()
            for call in (w.admit(), w.opened(writer), w.store.read("req_1"), w.store.last_id("req_1"),
                         w.queue().claim(5), w.queue().depths(),
                         w.store.end("req_1", "cancelled", Reason.CANCELLED, [])):  # fmt: skip
                with pytest.raises(JournalUnavailable):
                    await call
            assert time.monotonic() - began < 10

    asyncio.run(main())
