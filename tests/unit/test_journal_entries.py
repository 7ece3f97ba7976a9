"""The storage schema: ids compare as in Redis, everything is decoded as it was encoded; a wake-up
says what came since the previously announced entry.
"""

from __future__ import annotations

import hiredis
import msgspec
from hypothesis import given
from hypothesis import strategies as st

from serve_app import timings
from serve_app.journal.entries import (
    BEGINNING,
    MAX_ID_PART,
    PLAIN,
    REQUEST_ID,
    TERMINAL_ID,
    Entry,
    EntryId,
    Head,
    RequestFacts,
    compress,
    decode_wakes,
    encode_wakes,
    flatten,
    wake_of,
)
from serve_app.journal.reader import JournalReader
from serve_app.redis.connection import _packed
from serve_app.requests.lifecycle import append
from tests.tables import each
from tests.transcripts import transcript

parts = st.integers(0, MAX_ID_PART)
ids = st.builds(EntryId, parts, parts)


@given(ids)
def test_an_id_survives_redis_form(entry_id: EntryId) -> None:
    assert EntryId.parse(str(entry_id)) == EntryId.parse(str(entry_id).encode()) == entry_id


def test_the_request_comes_first_and_nothing_comes_after_the_terminal_entry() -> None:
    assert BEGINNING < REQUEST_ID < EntryId(1, 0) < TERMINAL_ID
    assert str(TERMINAL_ID) == "18446744073709551615-18446744073709551615"
    assert Entry(TERMINAL_ID, {}).terminal


def test_the_channel_keeps_its_name_in_redis() -> None:
    """Other versions read it during an upgrade."""
    facts = RequestFacts("standard", "t", "s", "m", True, 1, 2, "n:w:a")
    assert msgspec.json.decode(msgspec.json.encode(facts))["wake"] == "n:w:a"


@given(st.lists(st.binary()), st.integers(0, 9))
def test_a_transcript_is_all_response_bytes(body: list[bytes], level: int) -> None:
    assert transcript(Entry(TERMINAL_ID, {b"z": compress(body, level) or b""})) == b"".join(body)
    assert transcript(Entry(TERMINAL_ID, {})) is None


def test_a_wake_up_carries_what_the_client_needs_and_nothing_that_it_does_not() -> None:
    fields = dict.fromkeys((b"n", b"o", b"z", b"h", b"b", b"e", b"k", b"w", b"p", b"m"), b"1")
    payload = encode_wakes(
        [wake_of("req_1", Entry(EntryId(3, 4), fields)), wake_of("req_2", Entry(TERMINAL_ID, {}))]
    )
    (first, entry), (second, terminal) = decode_wakes(payload)
    assert (first, second) == ("req_1", "req_2")
    assert entry.id == (3, 4)
    assert set(entry.fields) == {b"h", b"b", b"e", b"k", b"w", b"p", b"m"}
    assert terminal.terminal


NAMES = [b"n", b"h", b"o", b"b", b"e", b"u", b"f", b"q"]
names = st.just(list(PLAIN)) | st.lists(st.sampled_from(NAMES), unique=True)
values = st.binary() | st.integers(0, 2 * timings.LARGE_BYTES).map(bytes)


@given(st.text(alphabet=st.characters(codec="utf-8")), ids, names, st.data())
def test_a_plain_entry_has_the_bytes_of_any_other(
    key: str, entry_id: EntryId, names: list[bytes], data: st.DataObject
) -> None:
    """Its command and its wake-up are made in a way of their own."""
    entry = Entry(entry_id, {name: data.draw(values) for name in names})
    words = ("XADD", key, "NOMKSTREAM", str(entry_id), *flatten(entry))
    assert _packed(append(key, entry)) == hiredis.pack_command(words)
    told = {name: entry.fields[name] for name in names if name in (b"h", b"b", b"e", b"f")}
    large = len(entry.body) > timings.LARGE_BYTES
    wanted = {b"p": b""} if large else {**told, b"p": b"1-2"}
    assert list(entry.for_readers("1-2").items()) == list(wanted.items())


def test_only_an_event_stream_counts_as_streamed() -> None:
    assert Head(200, [("content-type", "text/event-stream; charset=utf-8")]).streamed
    assert not Head(200, [("content-type", "application/json")]).streamed
    head = Head(404, [("content-type", "application/json")])
    assert Entry(EntryId(1, 1), {b"h": msgspec.json.encode(head)}).head == head


@each(
    "entry_id, fields, needed",
    [
        # Not the outputs of a response that is not streamed.
        (EntryId(1, 3), {b"n": b"x", b"o": b"[]", b"e": b"0"}, False),
        (EntryId(1, 0), {b"n": b"x", b"m": b"{}"}, True),
        (EntryId(1, 1), {b"b": b"data"}, True),
        (EntryId(1, 1), {b"h": b"{}"}, True),
        (TERMINAL_ID, {b"k": b"completed"}, True),
    ],
)
def test_openings_bytes_heads_and_endings_are_announced(
    entry_id: EntryId, fields: dict[bytes, bytes], needed: bool
) -> None:
    assert Entry(entry_id, fields).needed_by_readers == needed


THIRD = Entry(EntryId(1, 3), {b"b": b"data"})
ENDING = Entry(TERMINAL_ID, {b"k": b"completed", b"p": b"1-57", b"b": b"{}"})


@each(
    "entry, after, position, contiguous",
    [
        # After outputs that were not announced, an ending follows what was announced last.
        (ENDING, "1-0", EntryId(1, 0), True),
        (ENDING, "1-0", REQUEST_ID, False),
        # A lost wake-up is noticed by the next.
        (THIRD, "1-2", EntryId(1, 1), False),
        (THIRD, "1-2", EntryId(1, 2), True),
        # A writer that is not sure makes readers look.
        (THIRD, "", EntryId(1, 2), False),
    ],
)
def test_a_wake_up_says_what_it_follows(
    entry: Entry, after: str, position: EntryId, contiguous: bool
) -> None:
    ((_, received),) = decode_wakes(encode_wakes([wake_of("req", entry, after)]))
    assert JournalReader(position=position).contiguous(received) == contiguous
