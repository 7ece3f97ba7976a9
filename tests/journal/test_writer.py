"""The end of a request, group commit and wake-ups, including while Redis rejects writes."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from redis.exceptions import ResponseError

from serve_app import timings
from serve_app.contract import Reason, State
from serve_app.errors import Fenced, RedisUnavailable
from serve_app.journal import attempt_log
from serve_app.journal.entries import TERMINAL_ID, EntryId, compress, decode_wakes
from serve_app.settings.sections import EngineSettings
from tests.journal.in_process import worker_process
from tests.journal.journal_helpers import (
    HEAD,
    OPENED,
    SUMMARY,
    PrivateRedis,
    World,
    add,
    added,
    complete,
    event,
    events,
    finish,
    world,
)
from tests.transcripts import transcript
from tests.waiting import PATIENCE_S, eventually
from workers.journal_writer import JournalWriter

TERMINAL = str(TERMINAL_ID)
LAST = "1-2"
SIMULATED = EngineSettings(kind="simulated")
RETENTION_S = 30


@pytest.fixture
def sections() -> dict[str, Any]:
    return {"journal": {"retention_s": RETENTION_S}}


async def test_nothing_can_follow_the_terminal_entry(w: World) -> None:
    attempt = await w.started()
    add(attempt, 1)
    await complete(attempt)
    for entry_id in ("*", "2-0", "99999999999999-1", TERMINAL):
        with pytest.raises(ResponseError, match="exhausted"):
            await w.redis.xadd(w.store.key("req_1"), {"a": "b"}, id=entry_id)
    with pytest.raises(Fenced):
        await w.opened(await w.writer(), 2, b"nonce-2")
    assert not await w.endings.end("req_1", Reason.CANCELLED)


@pytest.mark.parametrize("again", [False, True])
async def test_the_end_of_a_long_answer_keeps_no_other_stream_waiting(
    w: World, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Also if Redis forgets some of it meanwhile (`again`)."""
    packers: list[threading.Thread] = []
    go_on = threading.Event()

    def packing(*args: Any) -> bytes | None:
        packers.append(threading.current_thread())
        if threading.current_thread() is not threading.main_thread():
            go_on.wait(PATIENCE_S)
        return compress(*args)

    monkeypatch.setattr(attempt_log, "compress", packing)
    long = await w.started()
    writer = w._started[-1]
    assert isinstance(writer, JournalWriter)
    texts = [b"id: %d\ndata: %b\n\n" % (number, b"x" * 40_000) for number in range(1, 6)]
    for number, text in enumerate(texts, 1):
        long.append([[0, "x", [1], None, None, None]], [text], number, HEAD)
        await eventually(lambda: not long.pending)
    finish(long)
    await eventually(lambda: packers)
    if again:
        long.restart_after(EntryId(1, 2))
        writer._mark(long)
    await w.admit("req_2")
    short, _ = await writer.open("req_2", 1, b"nonce", OPENED)
    await added(short, 1)
    await complete(short)
    assert not long.closed.done()
    go_on.set()
    await long.closed
    assert transcript((await w.entries())[-1]) == b"".join(texts)
    assert [one is threading.main_thread() for one in packers] == [False, True]


async def test_a_worker_tells_the_pause_of_its_engines_steps(w: World) -> None:
    async with worker_process(w.settings.model_copy(update={"engine": SIMULATED})) as worker:
        pause = worker._writer.pause
        for _ in range(2):
            worker._engine.progress.stepped()
        pause.begin(1_000_000)
        assert pause.on


async def test_a_turn_begins_a_pause(w: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "ENTRIES_PER_S", 0.01)
    attempt = await w.started()
    attempt.pause.stepped()
    attempt.pause.stepped()
    assert not attempt.pause.on
    await added(attempt, 1)
    assert attempt.pause.on


async def expires_soon(w: World) -> bool:
    return bool(0 < await w.redis.pttl(w.store.key("req_1")) <= RETENTION_S * 1000)


async def test_a_completed_journal_is_one_terminal_entry_that_holds_the_transcript(
    w: World,
) -> None:
    attempt = await w.started()
    for number in range(1, 21):
        await added(attempt, number)
    assert len(await w.entries()) == 22
    await complete(attempt)
    await eventually(lambda: w.compacted())
    await eventually(lambda: expires_soon(w))
    (terminal,) = await w.entries()
    assert terminal.id == TERMINAL_ID
    assert transcript(terminal) == events(1, 20)
    assert (terminal.state, terminal.events, terminal.head) == ("completed", 20, HEAD)
    assert terminal.fields[b"p"] == b"1-21"


@pytest.mark.parametrize("outside", [True, False])
async def test_a_journal_that_failed_or_was_cancelled_keeps_its_entries(
    w: World, outside: bool
) -> None:
    attempt = await w.started()
    await added(attempt, 1)
    if outside:
        await w.endings.end("req_1", Reason.CANCELLED)
    else:
        attempt.stop(State.FAILED, Reason.ENGINE_ERROR, SUMMARY, None)
        await attempt.closed
    await eventually(lambda: expires_soon(w))
    assert await w.ids() == ["0-1", "1-0", "1-1", *([] if outside else [LAST]), TERMINAL]
    assert transcript((await w.entries())[-1]) is None


async def test_appends_keep_the_expiry_that_was_set_at_admission(w: World) -> None:
    await w.admit()
    admitted_ms = await w.redis.pttl(w.store.key("req_1"))
    ends_s = 60 + 300  # its deadline, and time for somebody to end it
    assert 60_000 < admitted_ms <= 1000 * ends_s
    attempt = await w.opened(await w.writer())
    await added(attempt, 1)
    assert 0 < await w.redis.pttl(w.store.key("req_1")) <= admitted_ms


async def test_what_comes_while_a_flush_is_underway_rides_in_the_next_as_one_entry(
    w: World,
) -> None:
    attempt = await w.started()
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


async def test_a_wake_up_is_published_only_for_what_stands_in_the_journal(w: World) -> None:
    await w.admit()
    pubsub = w.redis.pubsub(ignore_subscribe_messages=True)
    await pubsub.subscribe(w.channel)
    await eventually(lambda: w.subscribers())
    old = await w.opened(await w.writer(), 1, b"nonce-1")
    await added(old, 1)
    new = await w.opened(await w.writer(), 2, b"nonce-2")
    old.append([], [b"id: 2\ndata: refused\n\n"], 2)
    with pytest.raises(Fenced):
        await old.closed
    add(new, 1)
    await complete(new)
    told: list[EntryId] = []
    while not told or told[-1] != TERMINAL_ID:
        message = await pubsub.get_message(timeout=5)
        if message:
            standing = {entry.id for entry in await w.entries()}
            for request_id, entry in decode_wakes(message["data"]):
                assert request_id == "req_1"
                assert entry.id in standing or TERMINAL_ID in standing
                assert b"refused" not in entry.body
                told.append(entry.id)
    told = [entry_id for entry_id in told if entry_id != (2, 1)]
    assert told == [(1, 0), (1, 1), (2, 0), TERMINAL_ID]
    await pubsub.aclose()


async def test_opening_while_redis_is_out_of_memory_is_no_fence(w: World) -> None:
    await w.admit()
    writer = await w.writer()
    async with w.full():
        with pytest.raises(RedisUnavailable, match="OOM"):
            await w.opened(writer)
    await w.opened(writer)


@pytest.mark.parametrize("cut", [False, True])
async def test_a_journal_that_redis_refuses_holds_up_no_other(
    private_redis: PrivateRedis, namespace: str, monkeypatch: pytest.MonkeyPatch, cut: bool
) -> None:
    monkeypatch.setattr(timings, "APPEND_RETRY_S", (0.02, 3600.0))  # a second pause is for ever
    async with world(private_redis.url, namespace) as w:
        writer = await w.writer()
        refused, other = [
            (await writer.open(await w.admit(name), 1, name.encode(), OPENED))[0]
            for name in ("req_1", "req_2")
        ]
        private_redis.run("ACL", "SETUSER", "hermes", "resetkeys", f"~{w.store.key('req_2')}")
        add(refused, 1)
        await added(other, 1)
        if cut:
            private_redis.run("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        for number in range(2, 6):
            await added(other, number)
        assert refused.pending


async def test_what_redis_has_refused_is_appended_when_it_takes_it_again(
    private_redis: PrivateRedis, namespace: str
) -> None:
    async with world(private_redis.url, namespace) as w:
        attempt = await w.started()
        private_redis.run("ACL", "SETUSER", "hermes", "resetkeys")
        add(attempt, 1)
        await eventually(lambda: attempt.unaccepted)
        add(attempt, 2)
        private_redis.run("ACL", "SETUSER", "hermes", "allkeys")
        await complete(attempt)
        assert transcript((await w.entries())[-1]) == events(1, 2)


async def test_a_redis_that_is_away_is_one_exception_everywhere(namespace: str) -> None:
    async with world("redis://127.0.0.1:1/0", namespace) as w:
        writer = await w.writer()
        for call in (
            w.admit(),
            w.opened(writer),
            w.store.read("req_1"),
            w.store.record("req_1"),
            w.queue().claim(5),
            w.depths(),
            w.endings.end("req_1", Reason.CANCELLED),
        ):
            with pytest.raises(RedisUnavailable):
                await call
