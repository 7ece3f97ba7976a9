"""What a reader has seen of a journal, and what the next entry adds. Pure.

The same state machine handles wake-up messages, stream reads and the compacted journal of a
finished request.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from serve_app.contract import Reason, State
from serve_app.errors import REASONS
from serve_app.journal.entries import (
    BEGINNING,
    FIRST_OPENING_ID,
    REQUEST_ID,
    AttemptFacts,
    Entry,
    EntryId,
    Head,
    RequestFacts,
    Summary,
    decode_facts,
)
from serve_app.journal.events import Pieces, after_event, events_in

_HOLD_BYTES = 64 * 1024
_PLAIN = frozenset((b"b", b"e", b"p"))
"""The fields of a wake-up that adds events to a stream and nothing else."""


@dataclass(slots=True)
class Ending:
    """How a request ended."""

    state: State
    reason: Reason | None
    """None if the request was completed."""
    summary: Summary | None

    @property
    def message(self) -> str:
        if self.summary and self.summary.message:
            return self.summary.message
        if self.reason is Reason.ATTEMPT_LOST and self.summary and self.summary.why:
            return (
                "The engine that worked on this request died, and the answer cannot be continued "
                f"because {self.summary.why}; please try again."
            )
        return REASONS[self.reason].says if self.reason else ""


class JournalReader:
    """Follows one journal after a given event.

    `seen` is the number of the last event that the client already has. After `feed`, `take()`
    returns the new bytes; `head`, `attempt` and `ending` are set as they become known.
    """

    def __init__(self, seen: int = 0, position: EntryId = BEGINNING) -> None:
        self.position = position
        self.facts: RequestFacts | None = None
        self.head: Head | None = None
        self.attempt: AttemptFacts | None = None
        self.attempts = 0
        self.ending: Ending | None = None
        self.streams = False
        """Whether the response is a stream of events; False while its head is unknown."""
        self.held_bytes = 0
        """How many bytes wait to be taken."""
        self._body: list[bytes] = []
        self._pieces: Pieces | None = None
        self._bytes_at = BEGINNING
        self.last_event = 0
        """Number of the last event in the journal so far."""
        self.seen = seen
        self._passed_event = seen

    @property
    def full(self) -> bool:
        """Whether so many bytes wait to be taken that no more entries should be fed; they remain in
        the stream.
        """
        return self.streams and self.held_bytes > _HOLD_BYTES

    @property
    def memory_bytes(self) -> int:
        """How many bytes it holds of what is to be taken, a transcript packed."""
        return self.held_bytes + (self._pieces.packed_bytes if self._pieces is not None else 0)

    @property
    def more(self) -> bool:
        """Whether there are bytes to take."""
        return bool(self._body) or (self._pieces is not None and not self._pieces.done)

    def take(self) -> bytes:
        """The response bytes that are new since the last call; of a transcript, one piece. Those of
        a response that is not streamed count only with its end: until then another attempt may
        begin them again.
        """
        if self._pieces is not None:
            return self._next_piece(self._pieces)
        if not self.streams and self.ending is None:
            return b""
        body = b"".join(self._body)
        self._drop()
        self._passed_event = max(self._passed_event, self.last_event)
        return body

    def _next_piece(self, pieces: Pieces) -> bytes:
        try:
            return pieces.take()
        except zlib.error:  # bytes already sent remain valid
            pieces.done = True
            self.ending = Ending(State.FAILED, Reason.JOURNAL_LOST, None)
            return b""

    def contiguous(self, entry: Entry) -> bool:
        """Whether no entry that a reader needs can be missing between the position and this
        entry.
        """
        before = entry.fields.get(b"p")
        if before is not None:
            return before == b"%d-%d" % self.position
        if entry.ends:
            return False
        if self.position == REQUEST_ID:  # only the opening of the first attempt can follow it
            return entry.id == FIRST_OPENING_ID
        return entry.id.is_next_to(self.position)

    def feed(self, entry: Entry) -> None:
        """Process the next entry. An entry at or before the position is a duplicate and changes
        nothing.
        """
        if entry.id <= self.position or self.ending is not None:
            return
        packed = entry.packed if entry.ends and not self.contiguous(entry) else None
        if not self._continues(entry):
            self.ending = Ending(State.FAILED, Reason.JOURNAL_LOST, None)
            return
        self.position = entry.id
        if self.head is None and (head := entry.head) is not None:
            self.head, self.streams = head, head.streamed
        if entry.id == REQUEST_ID:
            self.facts = decode_facts(entry, RequestFacts)
        elif entry.ends:
            self._end(entry, packed)
        elif entry.id.opens:
            self.attempt = decode_facts(entry, AttemptFacts)
            self.attempts = entry.id.epoch
            if not self.streams:  # nothing of it has been passed on
                self._drop()
                self._bytes_at = BEGINNING
        else:
            self._add(entry.body, entry.events)

    def pass_on(self, entry: Entry, push: Callable[[bytes], bool]) -> bool:
        """What `feed` and `take` do, if the entry of a wake-up only has the next events, nothing is
        held, and `push` sends them (hot path). False: nothing has changed.
        """
        entry_id, fields = entry
        if (
            len(fields) != len(_PLAIN)
            or not _PLAIN.issuperset(fields)
            or fields[b"p"] != b"%d-%d" % self.position
            or entry_id <= self.position
            or not self.streams
            or self.held_bytes
            or self.ending is not None
            or self.last_event < self.seen
        ):
            return False
        try:
            event = int(fields[b"e"])
        except ValueError:
            return False
        if event < self.last_event or not push(fields[b"b"]):
            return False
        self.position = self._bytes_at = entry_id
        self.last_event = self._passed_event = event
        return True

    def _continues(self, entry: Entry) -> bool:
        """Whether a later attempt continues exactly after the bytes that this reader knows.

        It always does, unless Redis failed over and lost entries that an attempt had built on: then
        entries of older epochs are missing, or are after the position that the attempt resumed
        from. In a response that is not streamed no older bytes can be missing, because they come
        all at once, from one attempt.
        """
        bytes_at = self._bytes_at
        if entry.body:
            self._bytes_at = entry.id
        if entry.resumed_from is None:
            return True
        event = self.last_event + events_in(entry.body) if entry.events else 0
        return bytes_at <= entry.resumed_from and event == entry.events >= self.last_event

    def _add(self, body: bytes, events: int) -> None:
        if events:
            body = after_event(body, self.last_event + 1, self.seen)
            self.last_event = events
        if body:
            self._body.append(body)
            self.held_bytes += len(body)

    def _is_whole(self, entry: Entry) -> bool:
        """Whether a response that is not streamed is complete: if its request ended otherwise, from
        outside or by its worker, that may have been in the middle of it, unless the response itself
        tells the failure.
        """
        if entry.state is State.COMPLETED:
            return True
        return bool(entry.counts) and self.head is not None and self.head.status >= 400

    def _drop(self) -> None:
        self._body.clear()
        self.held_bytes = 0

    def _end(self, entry: Entry, packed: bytes | None) -> None:
        summary = entry.summary
        if summary is not None:
            self.facts = self.facts or summary.request
            self.attempt = summary.attempt or self.attempt
            self.attempts = max(self.attempts, summary.attempts)
        if not self.streams and not self._is_whole(entry):
            self._drop()
        elif packed is None:
            if entry.body or entry.events:
                self._add(entry.body, entry.events or self.last_event)
        else:
            # Earlier entries were trimmed: the transcript replaces everything that this reader
            # has not passed on.
            self._drop()
            self._pieces = Pieces(packed, self._passed_event if entry.events else 0)
            self.last_event = entry.events
        self.ending = Ending(entry.state or State.FAILED, entry.reason, summary)


def read_whole(entries: Iterable[Entry]) -> tuple[JournalReader, bytes]:
    """A reader that has read a journal, and all response bytes that it gives."""
    reader, parts = JournalReader(), []
    for entry in entries:
        reader.feed(entry)
    while reader.more:
        parts.append(reader.take())
    return reader, b"".join(parts)
