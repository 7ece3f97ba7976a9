"""The writer's side of one attempt: what has been produced, what Redis has accepted. Pure."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from serve_app.errors import Fenced
from serve_app.journal.entries import MAX_ID_PART, TERMINAL_ID, Entry, EntryId, Head, Summary, compress

_json = msgspec.json.Encoder()


class Attempt:
    """Entries of one epoch, in the three places where they can be: buffered, built but not accepted, accepted.

    Accepted entries are kept until the terminal entry is: a Redis that comes back older is made whole from them.
    `closed` ends with the terminal entry accepted, or with `Fenced`.
    """

    __slots__ = (
        "_body", "_compression_level", "_ending", "_events", "_head", "_last_head", "_mark", "_outputs", "_quit",
        "_resumed_from", "_seq", "_transcript", "announced", "channel", "closed", "epoch", "history", "key", "nonce",
        "request_id", "unaccepted",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        key: str,
        epoch: int,
        nonce: bytes,
        channel: str,
        mark: Callable[[Attempt], None],
    ) -> None:
        self.request_id = request_id
        self.key = key
        self.epoch = epoch
        self.nonce = nonce
        self.channel = channel
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.history: list[Entry] = []
        self.unaccepted: deque[Entry] = deque()
        self.announced = ""
        self._mark = mark
        self._seq = 0
        self._outputs: list[Any] = []
        self._body: list[bytes] = []
        self._events = 0
        self._head: Head | None = None
        self._transcript: list[bytes] = []
        self._last_head: Head | None = None
        self._compression_level: int | None = None
        self._ending: dict[bytes, bytes] | None = None
        self._quit = ""
        self._resumed_from: EntryId | None = None

    @property
    def pending(self) -> bool:
        """Whether anything waits to be appended."""
        return bool(self.unaccepted or self._outputs or self._body or self._head or self._ending or self._quit)

    @property
    def last_built(self) -> EntryId:
        """The id of the newest entry that may have been sent to Redis."""
        return EntryId(self.epoch, self._seq)

    def continue_from(self, last: EntryId, body: bytes, events: int, head: Head | None) -> None:
        """Go on behind the entries of older epochs up to `last`, which hold these response bytes."""
        self._resumed_from = last
        self._transcript = [body] if body else []
        self._events = events
        self._last_head = head

    def append(self, outputs: list[Any], body: list[bytes], events: int, head: Head | None = None) -> None:
        """Add engine outputs and the response bytes that came of them.

        Args:
            outputs: `[index, text, token_ids, finish_reason, stop_reason, cached_tokens]` each.
            body: response bytes, SSE events already numbered.
            events: number of the last event so far.
            head: status and headers, with the first bytes.
        """
        if self._ending is not None or self._quit or self.closed.done():
            return
        self._outputs += outputs
        self._body += body
        self._events = max(self._events, events)
        self._head = head or self._head
        self._mark(self)

    def finish(self, state: str, reason: str, summary: Summary, compression_level: int | None) -> None:
        """End the request; the transcript goes into the terminal entry unless `compression_level` is None."""
        if self._ending is not None or self._quit or self.closed.done():
            return
        self._ending = {b"k": state.encode(), b"w": reason.encode(), b"m": _json.encode(summary)}
        self._compression_level = compression_level
        self._mark(self)

    def quit(self, reason: str) -> None:
        """Give the attempt up: say so in the journal, for whoever waits for it; the request goes on elsewhere."""
        if self._ending is not None or self.closed.done():
            return
        self._quit = reason
        self._mark(self)

    def take(self) -> Entry | None:
        """The one entry to append next: a built one that is not accepted yet, else all that is buffered."""
        if not self.unaccepted and self.pending:
            self._build()
        return self.unaccepted[0] if self.unaccepted else None

    def _build(self) -> None:
        fields: dict[bytes, bytes] = {b"n": self.nonce}
        if self._head is not None:
            fields[b"h"] = _json.encode(self._head)
        if self._outputs:
            fields[b"o"] = _json.encode(self._outputs)
        if self._body:
            fields[b"b"] = b"".join(self._body)
            self._transcript.append(fields[b"b"])
        fields[b"e"] = b"%d" % self._events
        if self._resumed_from is not None:
            fields[b"f"] = str(self._resumed_from).encode()
            if self._body:  # readers look at bytes alone, and know of no other entry
                self._resumed_from = None
        if self._quit:
            fields[b"q"] = self._quit.encode()
            self._quit, self._ending = "", {}
        self._last_head = self._head or self._last_head
        self._outputs, self._body, self._head = [], [], None
        if self._ending:
            before = self.last_built
            self._seq = MAX_ID_PART
            seal = Entry(self.last_built, fields | self._ending | {b"p": str(before).encode()})
            self.unaccepted += (seal, self._terminal(seal))
            self._ending = {}
        else:
            self._seq += 1
            self.unaccepted.append(Entry(self.last_built, fields))

    def _terminal(self, seal: Entry) -> Entry:
        """What follows the seal once it is accepted; with the transcript it stands for all entries before."""
        kept = {name: seal.fields[name] for name in (b"n", b"e", b"k", b"w", b"m")}
        if self._compression_level is not None:
            kept[b"z"] = compress(self._transcript, self._compression_level)
            if self._last_head is not None:
                kept[b"h"] = _json.encode(self._last_head)
        return Entry(TERMINAL_ID, {**kept, b"p": str(seal.id).encode()})

    def accepted(self, entry: Entry) -> None:
        """Redis holds the entry."""
        if self.unaccepted and self.unaccepted[0].id == entry.id:
            self.unaccepted.popleft()
        self.history.append(entry)

    def rewind(self, last: EntryId) -> None:
        """Redis holds nothing behind `last`: what was accepted after it must be appended again."""
        lost = [entry for entry in self.history if entry.id > last]
        held = [entry for entry in self.unaccepted if entry.id <= last]
        self.history = [entry for entry in self.history if entry.id <= last] + held
        self.unaccepted = deque(lost + [entry for entry in self.unaccepted if entry.id > last])

    def move_behind(self, last: EntryId) -> None:
        """Number what is not accepted yet as if it were another attempt's. Only without fencing."""
        self.epoch, self._seq = last
        waiting = list(self.unaccepted)
        self.unaccepted.clear()
        for entry in waiting:
            if entry.id.seq != MAX_ID_PART:
                self._seq += 1
                entry = entry._replace(id=self.last_built)
            self.unaccepted.append(entry)

    def close(self, fenced: bool) -> None:
        """The terminal entry is accepted, or the attempt is fenced: nothing more is appended."""
        self.unaccepted.clear()
        self._outputs, self._body, self._transcript, self.history = [], [], [], []
        self._head, self._ending = None, {}
        if not self.closed.done():
            if fenced:
                self.closed.set_exception(Fenced(f"{self.request_id}: epoch {self.epoch} is fenced"))
                self.closed.exception()  # retrieved: whoever awaits it gets it all the same
            else:
                self.closed.set_result(None)
