"""What a wake-up says about the entries since the previously announced one."""

from __future__ import annotations

from serve_app.journal.entries import Entry
from serve_app.journal.ids import REQUEST_ID, TERMINAL_ID, EntryId
from serve_app.journal.reader import JournalReader
from serve_app.journal.wakes import decode_wakes, encode_wakes, wake_of


def through_the_wire(entry: Entry, after: str | None) -> Entry:
    ((_, received),) = decode_wakes(encode_wakes([wake_of("req", entry, after)]))
    return received


def reader_at(position: EntryId) -> JournalReader:
    return JournalReader(position=position)


def test_outputs_of_a_response_that_is_not_streamed_are_not_announced() -> None:
    assert not Entry(EntryId(1, 3), {b"n": b"x", b"o": b"[]", b"e": b"0"}).needed_by_readers


def test_openings_bytes_heads_and_endings_are_announced() -> None:
    for entry in (
        Entry(EntryId(1, 0), {b"n": b"x", b"m": b"{}"}),
        Entry(EntryId(1, 1), {b"b": b"data"}),
        Entry(EntryId(1, 1), {b"h": b"{}"}),
        Entry(TERMINAL_ID, {b"k": b"completed"}),
    ):
        assert entry.needed_by_readers


def test_an_ending_after_unannounced_outputs_follows_what_was_announced_last() -> None:
    ending = through_the_wire(
        Entry(TERMINAL_ID, {b"k": b"completed", b"p": b"1-57", b"b": b"{}"}), after="1-0"
    )
    assert reader_at(EntryId(1, 0)).contiguous(ending)
    assert not reader_at(REQUEST_ID).contiguous(ending)


def test_a_lost_wake_up_is_noticed_by_the_next() -> None:
    third = through_the_wire(Entry(EntryId(1, 3), {b"b": b"data"}), after="1-2")
    assert not reader_at(EntryId(1, 1)).contiguous(third)
    assert reader_at(EntryId(1, 2)).contiguous(third)


def test_a_writer_that_is_not_sure_makes_readers_look() -> None:
    unsure = through_the_wire(Entry(EntryId(1, 3), {b"b": b"data"}), after="")
    assert not reader_at(EntryId(1, 2)).contiguous(unsure)


def test_the_wake_up_does_not_carry_what_no_reader_needs() -> None:
    entry = through_the_wire(
        Entry(EntryId(1, 1), {b"n": b"nonce", b"o": b"[]", b"z": b"z", b"b": b"data"}), "1-0"
    )
    assert set(entry.fields) == {b"b", b"p"}
