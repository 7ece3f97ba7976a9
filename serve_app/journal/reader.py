"""What a reader has seen of a journal, and what an entry adds to it. Pure.

The same state machine serves wake-up messages, stream reads and the compacted journal of a finished request.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from serve_app.errors import Reason
from serve_app.journal.entries import (
    BEGINNING,
    REQUEST_ID,
    AttemptFacts,
    Entry,
    EntryId,
    Head,
    RequestFacts,
    Summary,
    decode_facts,
)
from serve_app.journal.events import after_event, events_in
from serve_app.journal.pieces import Pieces

_HOLD_BYTES = 256 * 1024

MESSAGES = {
    Reason.CANCELLED: "The request was cancelled.",
    Reason.CLIENT_DISCONNECTED: "The client disconnected and did not come back.",
    Reason.DEADLINE: "The request's deadline passed before it was finished.",
    Reason.ATTEMPT_LOST: "The engine that worked on this request died and it cannot be continued; please try again.",
    Reason.JOURNAL_LOST: "Redis lost a part of this request's journal; please send the request again.",
    Reason.POISON: "This request ended every engine that worked on it and will not be tried again.",
    Reason.LOOP_HELD: "One step of this request kept all others of its engine waiting; make it smaller or simpler.",
    Reason.ENGINE_ERROR: "The engine failed on this request.",
}
"""What the caller is told, by the reason of the end."""


@dataclass(slots=True)
class Ending:
    """How a request ended."""

    state: str
    reason: str
    summary: Summary | None

    @property
    def message(self) -> str:
        """One sentence for the caller."""
        return MESSAGES.get(Reason(self.reason), "The request failed.") if self.reason else ""


class JournalReader:
    """Follows one journal from a given event on.

    `seen` is the number of the last event that the client already has. After `feed`, the new bytes stand in
    `take()`; `head`, `attempt` and `ending` are set as they become known.
    """

    __slots__ = (
        "_body", "_bytes_at", "_event", "_held_bytes", "_passed_bytes", "_passed_event", "_pieces", "_seen",
        "attempt", "attempts", "ending", "facts", "head", "position",
    )  # fmt: skip

    def __init__(self, seen: int = 0, position: EntryId = BEGINNING) -> None:
        self.position = position
        self.facts: RequestFacts | None = None
        self.head: Head | None = None
        self.attempt: AttemptFacts | None = None
        self.attempts = 0
        self.ending: Ending | None = None
        self._body: list[bytes] = []
        self._held_bytes = 0
        self._pieces: Pieces | None = None
        self._bytes_at = BEGINNING
        self._event = 0
        self._seen = seen
        self._passed_event = seen
        self._passed_bytes = 0

    @property
    def last_event(self) -> int:
        """Number of the last event in the journal so far."""
        return self._event

    @property
    def seen(self) -> int:
        """Number of the last event that the client has from another connection."""
        return self._seen

    @property
    def full(self) -> bool:
        """Whether so much has not been taken that no more should be fed: it stays in the stream."""
        return self._held_bytes > _HOLD_BYTES

    @property
    def more(self) -> bool:
        """Whether there is something to take."""
        return bool(self._body) or (self._pieces is not None and not self._pieces.done)

    def take(self) -> bytes:
        """The response bytes that are new since the last call; of a transcript, a piece of it."""
        if self._pieces is not None:
            return self._next_piece(self._pieces)
        body = b"".join(self._body)
        self._body.clear()
        self._held_bytes = 0
        self._passed_bytes += len(body)
        self._passed_event = max(self._passed_event, self._event)
        return body

    def _next_piece(self, pieces: Pieces) -> bytes:
        try:
            return pieces.take()
        except zlib.error:  # what has been sent of it stands
            pieces.done = True
            self.ending = Ending("failed", Reason.JOURNAL_LOST, None)
            return b""

    def contiguous(self, entry: Entry) -> bool:
        """Whether nothing that a reader needs can be missing between the position and this entry."""
        if b"p" in entry.fields:  # its writer says what it follows
            return entry.fields[b"p"] == str(self.position).encode()
        if entry.ends:
            return False
        if entry.id.epoch == self.position.epoch:
            return entry.id.seq == self.position.seq + 1
        # Nothing but the opening of the first attempt can follow the request itself.
        return entry.id == (1, 0) and self.position == REQUEST_ID

    def feed(self, entry: Entry) -> None:
        """Take in the next entry; one at or before the position is an echo and changes nothing."""
        if entry.id <= self.position or self.ending is not None:
            return
        whole = entry.fields.get(b"z") if entry.ends and not self.contiguous(entry) else None
        if not self._continues(entry):
            self.ending = Ending("failed", Reason.JOURNAL_LOST, None)
            return
        self.position = entry.id
        self.head = self.head or entry.head
        if entry.id == REQUEST_ID:
            self.facts = decode_facts(entry, RequestFacts)
        elif entry.ends:
            self._end(entry, whole)
        elif entry.id.seq == 0:
            self.attempt = decode_facts(entry, AttemptFacts)
            self.attempts = entry.id.epoch
        else:
            self._add(entry.body, entry.events)

    def _continues(self, entry: Entry) -> bool:
        """Whether a later attempt goes on exactly behind the bytes that this reader knows.

        It always does, unless Redis failed over and came back without what an attempt had built on: entries of
        older epochs are then missing, or stand behind the place that the attempt resumed from. Of a response that is
        not streamed no older bytes can be missing: they come whole, from one attempt.
        """
        bytes_at = self._bytes_at
        if entry.body:
            self._bytes_at = entry.id
        if entry.resumed_from is None:
            return True
        event = self._event + events_in(entry.body) if entry.events else 0
        return bytes_at <= entry.resumed_from and event == entry.events >= self._event

    def _add(self, body: bytes, events: int) -> None:
        if events:
            body = after_event(body, self._event + 1, self._seen)
            self._event = events
        if body:
            self._body.append(body)
            self._held_bytes += len(body)

    def _end(self, entry: Entry, whole: bytes | None) -> None:
        summary = decode_facts(entry, Summary) if b"m" in entry.fields else None
        if summary is not None:
            self.facts = self.facts or summary.request
            self.attempt = summary.attempt or self.attempt
            self.attempts = max(self.attempts, summary.attempts)
        if whole is None:
            if entry.body or entry.events:
                self._add(entry.body, entry.events or self._event)
        else:
            # What came before was trimmed: the transcript replaces all that this reader has not passed on.
            self._body.clear()
            self._held_bytes = 0
            self._pieces = Pieces(whole, self._passed_event) if entry.events else Pieces(whole, 0, self._passed_bytes)
            self._event = entry.events
        self.ending = Ending(entry.state, entry.reason, summary)
