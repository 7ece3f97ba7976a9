"""A reader returns the rest of the response, complete and once, however the journal reaches it."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.errors import Unreadable
from serve_app.journal.entries import (
    REQUEST_ID,
    TERMINAL_ID,
    AttemptFacts,
    Entry,
    EntryId,
    Head,
    RequestFacts,
    Summary,
    compress,
    decode_wakes,
    encode_wakes,
    wake_of,
)
from serve_app.journal.events import EventNumberer
from serve_app.journal.reader import JournalReader

FACTS = RequestFacts("standard", "t", "s", "m", True, 1, 2, "wake")
OPENED = AttemptFacts("replica-1", "engine-1", 5)
EVENT_STREAM = Head(200, [("content-type", "text/event-stream")])
JSON = Head(200, [("content-type", "application/json")])
REFUSED = Head(400, JSON.headers)
"""Of a failed response that is not streamed and tells its failure itself."""


@dataclass
class Journal:
    """A journal that is written entry by entry, as a worker does."""

    chunks: list[list[bytes]]
    """The events (or bytes) of each entry; the last ride in the terminal one."""
    streamed: bool = True
    completed: bool = True
    entries: list[Entry] = field(default_factory=list)
    items: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        numberer = EventNumberer()
        self.entries = [
            Entry(REQUEST_ID, {b"m": msgspec.json.encode(FACTS), b"r": b"{}", b"b": b"{}"}),
            Entry(EntryId(1, 0), {b"n": b"nonce", b"m": msgspec.json.encode(OPENED)}),
        ]
        head = msgspec.json.encode(self.head)
        for seq, chunk in enumerate(self.chunks, 1):
            items = [numberer.number(event) for event in chunk] if self.streamed else chunk
            self.items += items
            fields = {b"n": b"nonce", b"e": b"%d" % numberer.last}
            if items:
                fields |= {b"b": b"".join(items), b"h": head, b"o": b"[]"}
            self.entries.append(Entry(EntryId(1, seq), fields))
        last = self.entries.pop()
        ending = {b"k": b"failed", b"w": b"engine_error"}
        if self.completed:
            ending = {b"k": b"completed", b"w": b"", b"z": compress(self.items, 1) or b""}
        summary = Summary(FACTS, OPENED, 1, 9)
        ending |= {
            b"h": head,
            b"m": msgspec.json.encode(summary),
            b"p": str(self.entries[-1].id).encode(),
        }
        self.entries.append(Entry(TERMINAL_ID, {**last.fields, **ending}))

    @property
    def head(self) -> Head:
        return EVENT_STREAM if self.streamed else JSON if self.completed else REFUSED

    def stream(self, written: int, trimmed: bool) -> list[Entry]:
        """The contents of Redis after the first `written` entries were accepted."""
        if trimmed and self.completed and written == len(self.entries):
            return self.entries[-1:]
        return self.entries[:written]


def woken(reader: JournalReader, entry: Entry) -> bool:
    """Process a wake-up as the followers do. Returns whether the stream must be read."""
    ((_, entry),) = decode_wakes(encode_wakes([wake_of("req", entry)]))
    if reader.contiguous(entry):
        reader.feed(entry)
        return False
    return entry.id > reader.position


def read(reader: JournalReader, stream: list[Entry]) -> None:
    for entry in stream:
        reader.feed(entry)


event = st.text("ab", max_size=3).map(lambda text: f"data: {text}\n\n".encode())


@settings(max_examples=200)
@given(st.data())
def test_wake_ups_may_be_lost_and_doubled_and_reads_may_come_at_any_time(
    data: st.DataObject,
) -> None:
    streamed = data.draw(st.booleans(), "streamed")
    chunks = data.draw(st.lists(st.lists(event, max_size=3), min_size=1, max_size=6), "chunks")
    journal = Journal(chunks, streamed=streamed, completed=data.draw(st.booleans(), "completed"))
    # The connection that was admitted here, or one that came later.
    new = data.draw(st.booleans(), "new")
    seen = data.draw(st.integers(0, 8), "seen") if streamed and not new else 0
    reader = JournalReader(position=REQUEST_ID) if new else JournalReader(seen=seen)
    got = b""
    for written in range(2, len(journal.entries) + 1):
        for step in data.draw(
            st.lists(st.sampled_from(["wake", "echo", "read", "take"]), max_size=3), "steps"
        ):
            stale = False
            if step == "wake":
                stale = woken(reader, journal.entries[written - 1])
            elif step == "echo":
                stale = woken(
                    reader, journal.entries[data.draw(st.integers(0, written - 1), "which")]
                )
            elif step == "take":
                got += reader.take()
            if step == "read" or stale:
                read(reader, journal.stream(written, data.draw(st.booleans(), "trimmed")))
    read(reader, journal.stream(len(journal.entries), data.draw(st.booleans(), "trimmed at last")))
    got += reader.take()
    assert got == b"".join(journal.items[seen:])
    assert (reader.facts, reader.attempt, reader.attempts) == (FACTS, OPENED, 1)
    assert reader.head == journal.head
    assert reader.last_event == (len(journal.items) if streamed else 0)
    assert reader.ending is not None
    assert reader.ending.state == ("completed" if journal.completed else "failed")


@settings(max_examples=200)
@given(
    st.booleans(),
    st.integers(0, 3),
    st.lists(st.sampled_from("plain plain refused taken gap echo less more none odd".split())),
)
def test_what_is_passed_on_is_what_would_have_been_fed_and_taken(
    streamed: bool, seen: int, steps: list[str]
) -> None:
    """And what is not passed on has changed nothing."""
    reader = JournalReader(seen=seen, position=EntryId(1, 0))
    head = msgspec.json.encode(EVENT_STREAM if streamed else JSON)
    reader.feed(Entry(EntryId(1, 1), {b"h": head, b"b": b"data: 1\n\n", b"e": b"1"}))
    for step in steps:
        if step == "taken":
            reader.take()
            continue
        at, number = reader.position, reader.last_event + 1
        fields = {
            b"b": b"data: %d\n\n" % number,
            b"e": {"less": b"0", "odd": b"9" * 5000}.get(step, b"%d" % number),
            b"p": b"1-99" if step == "gap" else str(at).encode(),
        }
        if step == "more":
            fields |= {b"f": b"1-1"}
        elif step == "none":
            del fields[b"b"]
        entry = Entry(EntryId(1, at.seq + (step != "echo")), fields)
        nothing_before = streamed and not reader.held_bytes and reader.last_event >= seen
        before, pushed = copy.deepcopy(reader), list[bytes]()

        def push(body: bytes) -> bool:
            pushed.append(body)  # noqa: B023
            return step == "plain"  # noqa: B023

        passed = reader.pass_on(entry, push)
        assert passed == (step == "plain" and nothing_before)
        assert bool(pushed) == (step in ("plain", "refused") and nothing_before)
        if passed:
            assert before.contiguous(entry)
            before.feed(entry)
            assert [before.take()] == pushed
        assert vars(reader) == vars(before)
        if reader.contiguous(entry):
            with suppress(Unreadable):
                reader.feed(entry)
        if reader.ending is not None:
            return


def test_a_gap_is_no_successor() -> None:
    journal = Journal([[b"data: a\n\n"], [b"data: b\n\n"], []])
    request, opened, first, second, terminal = journal.entries
    reader = JournalReader()
    reader.feed(request)
    assert reader.contiguous(opened)
    assert not reader.contiguous(first)
    reader.feed(opened)
    assert reader.contiguous(first)
    assert not reader.contiguous(second)
    assert not reader.contiguous(terminal)
    assert not reader.contiguous(Entry(EntryId(2, 0), {}))
    assert not reader.contiguous(Entry(EntryId(2, 1), {}))
    from_outside = Entry(TERMINAL_ID, {b"k": b"cancelled", b"w": b"cancelled"})
    assert not JournalReader(position=REQUEST_ID).contiguous(from_outside)


def test_a_cancelled_request_keeps_what_was_written() -> None:
    journal = Journal([[b"data: a\n\n"], [b"data: b\n\n"], []])
    cancelled = Entry(TERMINAL_ID, {b"k": b"cancelled", b"w": b"cancelled"})
    reader = JournalReader(seen=1)
    read(reader, [*journal.entries[:-1], cancelled])
    assert reader.take() == journal.items[1]
    assert reader.ending is not None
    ending = (reader.ending.state, reader.ending.message)
    assert ending == ("cancelled", "The request was cancelled.")
    assert reader.last_event == 2
