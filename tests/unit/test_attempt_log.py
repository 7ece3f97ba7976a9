"""The writer's state of one attempt: one entry at a time, nothing forgotten, nothing after the end;
and which writer owns a journal.
"""

from __future__ import annotations

import gc
import hashlib
import json
import tracemalloc
import zlib

import pytest

from serve_app import timings
from serve_app.contract import Cause, Reason, State
from serve_app.errors import Fenced
from serve_app.journal.attempt_log import AttemptLog, AttemptState
from serve_app.journal.entries import (
    REQUEST_ID,
    TERMINAL_ID,
    Entry,
    EntryId,
    Head,
    Summary,
    opening_id,
)
from tests.tables import each
from tests.transcripts import transcript
from workers.journal_writer import standing

HEAD = Head(200, [("content-type", "text/event-stream")])
SUMMARY = Summary(None, None, 1, 9)


@pytest.fixture
def marks() -> list[AttemptLog]:
    return []


@pytest.fixture
async def attempt(marks: list[AttemptLog]) -> AttemptLog:
    """An attempt of epoch 2."""
    return AttemptLog("req", "ns:j:req", 2, b"nonce", "channel", marks.append)


def accept(attempt: AttemptLog) -> Entry:
    entry = attempt.take()
    assert entry is not None
    attempt.accepted(entry)
    return entry


def accept_end(attempt: AttemptLog) -> tuple[Entry, Entry]:
    """The last output and the terminal entry, which are appended together."""
    last = attempt.take()
    assert last is not None
    assert attempt.ending is not None
    assert attempt.ends_with(last)
    terminal, _ = attempt.ending
    attempt.accepted(last)
    return last, terminal


async def test_what_comes_while_nothing_is_sent_becomes_one_entry(
    attempt: AttemptLog, marks: list[AttemptLog]
) -> None:
    attempt.append([[0, "a", [1], None, None, 0]], [b"x"], 1, HEAD)
    attempt.append([[0, "b", [2], None, None, None]], [b"y", b"z"], 3)
    entry = accept(attempt)
    assert entry.id == (2, 1)
    assert entry.nonce == b"nonce"
    assert entry.body == b"xyz"
    assert entry.events == 3
    assert entry.head == HEAD
    assert entry.fields[b"o"] == b'[[0,"a",[1],null,null,0],[0,"b",[2],null,null,null]]'
    assert attempt.take() is None
    assert not attempt.pending
    assert marks == [attempt, attempt]


async def test_an_entry_is_offered_unchanged_until_it_is_accepted(attempt: AttemptLog) -> None:
    attempt.append([], [b"x"], 1)
    first = attempt.take()
    attempt.append([], [b"y"], 2)
    assert attempt.take() is first
    assert first is not None
    attempt.accepted(first)
    second = accept(attempt)
    assert (second.id, second.body) == ((2, 2), b"y")


async def test_the_last_output_takes_the_rest_with_it_and_the_terminal_entry_holds_the_transcript(
    attempt: AttemptLog,
) -> None:
    attempt.append([], [b"x"], 1, HEAD)
    accept(attempt)
    attempt.append([], [b"y"], 2)
    attempt.stop(State.COMPLETED, None, SUMMARY, 1)
    last, terminal = accept_end(attempt)
    assert (last.id, last.body, last.events, last.state) == ((2, 2), b"y", 2, None)
    assert terminal.id == TERMINAL_ID
    assert (terminal.events, terminal.state, terminal.head) == (2, "completed", HEAD)
    assert terminal.fields[b"p"] == b"2-2"
    assert transcript(terminal) == b"xy"
    assert not attempt.pending


async def test_the_end_waits_for_an_entry_that_is_underway(attempt: AttemptLog) -> None:
    attempt.append([], [b"x"], 1)
    first = attempt.take()
    attempt.stop(State.FAILED, Reason.ENGINE_ERROR, SUMMARY, None)
    assert attempt.take() is first
    assert attempt.pending
    assert first is not None
    attempt.accepted(first)
    last, terminal = accept_end(attempt)
    assert last.id == (2, 2)
    found = (terminal.id, terminal.reason, transcript(terminal))
    assert found == (TERMINAL_ID, "engine_error", None)


async def test_nothing_is_taken_in_after_the_end(attempt: AttemptLog) -> None:
    attempt.stop(State.COMPLETED, None, SUMMARY, 1)
    attempt.append([], [b"late"], 1)
    attempt.stop(State.FAILED, Reason.INTERNAL, SUMMARY, None)
    last, terminal = accept_end(attempt)
    assert last.body == b""
    assert (terminal.state, transcript(terminal)) == ("completed", b"")
    attempt.append([], [b"later"], 2)
    assert attempt.take() is None


async def test_what_is_too_much_for_an_entry_goes_into_several_outputs_first(
    attempt: AttemptLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "ENTRY_BYTES", 100)
    texts = [*"abcde", "f" * 200]
    outputs = [[0, text, [1], None, None, None] for text in texts]
    events = [b"id: %d\ndata: %b\n\n" % (n, text.encode()) for n, text in enumerate(texts, 1)]
    attempt.append(outputs, events, 6, HEAD)
    attempt.stop(Cause.ENGINE_FAILED)
    entries = [accept(attempt) for _ in range(5)]
    assert attempt.take() is None
    assert [len(json.loads(entry.outputs or "[]")) for entry in entries] == [3, 1, 1, 1, 0]
    assert [entry.body for entry in entries] == [b"", b"", b"", b"".join(events[:5]), events[5]]
    assert [entry.events for entry in entries] == [0, 0, 0, 5, 6]
    assert [bool(entry.quit) for entry in entries] == [False] * 4 + [True]


async def test_what_is_kept_of_a_long_answer_is_packed_and_still_restores_all_of_it(
    attempt: AttemptLog,
) -> None:
    texts = [
        b"%d %b" % (n, hashlib.blake2b(b"%d" % n).hexdigest()[:6].encode()) for n in range(3000)
    ]
    gc.collect()
    tracemalloc.start()
    for number, text in enumerate(texts, 1):
        event = b'id: %d\ndata: {"id":"chatcmpl-1","choices":[{"delta":{"content":"%b"}}]}\n\n'
        outputs = [[0, text.decode(), [number], None, None, None]]
        attempt.append(outputs, [event % (number, text)], number)
        accept(attempt)
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept_bytes < 100 * len(texts) + timings.PACK_BYTES, "a token as an entry takes 800"
    assert attempt.history.memory_bytes < kept_bytes < 2 * attempt.history.memory_bytes
    before = list(attempt.history)
    for last in (EntryId(2, 2999), EntryId(2, 1500), EntryId(1, 9)):
        attempt.restart_after(last)
        while attempt.take() is not None:
            accept(attempt)
        assert list(attempt.history) == before


async def test_what_would_hold_the_loop_is_not_packed_there(
    attempt: AttemptLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither large entries, nor a transcript at a level that takes long."""
    packed: list[int] = []
    compress = zlib.compress

    def seen(data: bytes, level: int) -> bytes:
        packed.append(len(data))
        return compress(data, level)

    monkeypatch.setattr(zlib, "compress", seen)
    large = b"x" * (timings.PACK_AT_MOST_BYTES + 1)
    for number, body in enumerate([b"small", large, b"y" * timings.PACK_BYTES], 1):
        attempt.append([], [body], number)
        accept(attempt)
    assert len(packed) == 1
    assert packed[0] < len(large)
    assert len(large) < attempt.history.memory_bytes < len(large) + 2_000
    assert b"".join(attempt.history.bodies()) == b"small" + large + b"y" * timings.PACK_BYTES
    before = list(attempt.history)
    attempt.restart_after(EntryId(2, 1))
    assert attempt.history.memory_bytes < 1_000
    while attempt.take() is not None:
        accept(attempt)
    assert list(attempt.history) == before


@each("level, at_once", [(0, True), (1, True), (2, False), (9, False)])
async def test_a_transcript_is_packed_at_once_unless_its_level_takes_long(
    level: int, at_once: bool
) -> None:
    attempt = AttemptLog("req_1", "j", 2, b"nonce", "", lambda _: None)
    attempt.append([], [b"x" * timings.PACK_AT_ONCE_BYTES], 1, HEAD)
    attempt.stop(State.COMPLETED, None, SUMMARY, level)
    assert (attempt.take() is not None) == at_once
    assert (attempt.packing is None) == at_once


async def test_a_rewind_offers_again_what_was_lost_and_then_what_was_not_accepted(
    attempt: AttemptLog,
) -> None:
    opening = Entry(EntryId(2, 0), {b"n": b"nonce"})
    attempt.accepted(opening)
    for number in (1, 2, 3):
        attempt.append([], [b"%d" % number], number)
        accept(attempt)
    attempt.append([], [b"4"], 4)
    attempt.take()
    attempt.append([], [b"5"], 5)
    attempt.restart_after(EntryId(0, 1))  # even the opening is gone
    assert [accept(attempt).id for _ in range(6)] == [(2, n) for n in range(6)]
    assert attempt.take() is None
    assert [entry.id.seq for entry in attempt.history] == [0, 1, 2, 3, 4, 5]


async def test_a_rewind_that_finds_more_than_was_answered_repeats_nothing(
    attempt: AttemptLog,
) -> None:
    attempt.append([], [b"1"], 1)
    attempt.take()  # sent; Redis took it, but its answer was lost
    attempt.append([], [b"2"], 2)
    attempt.restart_after(EntryId(2, 1))
    following = accept(attempt)
    assert (following.id, following.body) == ((2, 2), b"2")


async def test_a_fenced_attempt_offers_nothing_more(
    attempt: AttemptLog, marks: list[AttemptLog]
) -> None:
    attempt.append([[0, "a", [1], None, None, 0]], [b"x"], 1, HEAD)
    attempt.take()
    attempt.append([], [b"y"], 2, HEAD)
    attempt.stop(State.COMPLETED, None, SUMMARY, 1)
    marks.clear()
    attempt.close(fenced=True)
    attempt.close(fenced=False)  # too late: it stays fenced
    attempt.append([], [b"z"], 3)
    assert attempt.take() is None
    assert not attempt.pending
    assert marks == []
    assert isinstance(attempt.closed.exception(), Fenced)


def at(entry_id: EntryId, nonce: bytes = b"ours") -> Entry:
    return Entry.output(entry_id, nonce, None, b"", b"x", 1, None, None)


@each(
    "last, expected",
    [
        (None, AttemptState.FENCED),
        (at(EntryId(2, 3)), AttemptState.OPEN),
        (Entry.void(EntryId(2, 1), b"ours", Cause.NOT_OPENED), AttemptState.OPEN),
        (at(EntryId(2, 2), b"rival"), AttemptState.FENCED),
        (at(opening_id(3), b"next"), AttemptState.FENCED),
        (at(REQUEST_ID, b""), AttemptState.OPEN),
        (at(TERMINAL_ID), AttemptState.ENDED),
        (at(TERMINAL_ID, b"somebody"), AttemptState.FENCED),
    ],
)
async def test_the_last_entry_determines_the_owner_of_the_journal(
    last: Entry | None, expected: AttemptState
) -> None:
    attempt = AttemptLog("req_1", "key", 2, b"ours", "", lambda _: None)
    for number in range(3):
        attempt.append([], [b"x"], number, None)
        accept(attempt)
    assert attempt.last_built == EntryId(2, 3)
    assert standing(attempt, last) is expected
