"""What one attempt appends: what was produced, and what Redis has accepted of it; and how long an
engine keeps what its running requests make. Pure.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum, auto
from functools import partial
from itertools import chain
from typing import Any

import msgspec

from serve_app import timings
from serve_app.contract import Cause, Reason, State
from serve_app.errors import Fenced
from serve_app.journal.entries import (
    Entry,
    EntryId,
    Head,
    Summary,
    compress,
    encode_outputs,
    encode_used,
)
from serve_app.journal.events import events_in
from serve_app.settings.sections import JournalSettings

_OTHER_BYTES = 550
"""An entry's memory besides response bytes and outputs: Python's objects, and short values."""
_PLANNED_SHARE = 0.9
"""Of the longest wait: steps are not equally long."""
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[tuple[int, int, dict[bytes, bytes]]])

_End = tuple[State, Reason | None, Summary, int | None]
"""Of a request; last the compression level of the transcript in it, None for no transcript."""


class AttemptState(Enum):
    """The life of an attempt on its worker. `AttemptLog.stop` leaves `OPEN`, once;
    `AttemptLog.close` leaves any state for one of the last two, of which the first counts.
    """

    OPEN = auto()
    """The engine's outputs and its server's bytes are recorded."""
    STOPPING = auto()
    """The last entry is decided, and Redis has not accepted it yet. Nothing more is recorded."""
    ENDED = auto()
    """Redis has accepted the end of the request."""
    FENCED = auto()
    """Another attempt goes on, or somebody else has ended the request."""


class AttemptLog:
    """The entries of one epoch, each buffered, built but not yet accepted, or accepted.

    Accepted entries are kept (`History`). `closed` ends with the request, or with `Fenced`.
    """

    def __init__(
        self,
        request_id: str,
        key: str,
        epoch: int,
        nonce: bytes,
        channel: str,
        mark: Callable[[AttemptLog], None],
    ) -> None:
        self.request_id, self.key, self.channel = request_id, key, channel
        self.epoch, self.nonce = epoch, nonce
        self.settings = JournalSettings()
        self.pause = Pause()
        self.state = AttemptState.OPEN
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.history = History()
        self.unaccepted: deque[Entry] = deque()
        self.ending: tuple[Entry, Summary] | None = None
        """The terminal entry, which is appended together with the last of `unaccepted`, and the
        summary in it; None before the request ends."""
        self.queued = b""
        """The id of the request's queue entry, which its end removes; empty if it is not known."""
        self.announced = ""
        self.met_full = False
        """Whether Redis was full when it refused an entry last."""
        self.bytes = 0
        """How much was appended: response bytes, and the engine's outputs once they are entries."""
        self.head: Head | None = None
        """Of the response, once it was appended, here or by an older attempt."""
        self._mark = mark
        self._seq = 0
        self._outputs: list[Any] = []
        self._body: list[bytes] = []
        self._used: tuple[int, ...] = ()
        self._events = 0
        self._events_built = 0
        self._head: Head | None = None
        self._older = b""
        self._last: Cause | _End | None = None
        """What the last entry says, before that is built."""
        self._closing: tuple[Entry, _End] | None = None
        """The last output and how the request ends, while the transcript is packed."""
        self.packing: Callable[[], bytes | None] | None = None
        """Packs a long transcript, in any thread; `packed` takes what it returns."""
        self._resumed_from: EntryId | None = None

    @property
    def pending(self) -> bool:
        """Whether anything waits to be appended."""
        new = self._outputs or self._body or self._head
        return bool(self.unaccepted or new or self._last or self._closing)

    @property
    def last_built(self) -> EntryId:
        """The id of the newest entry that may have been sent to Redis."""
        return EntryId(self.epoch, self._seq)

    def continue_from(self, last: EntryId, body: bytes, events: int, head: Head | None) -> None:
        """Continue after the entries of older epochs up to `last`, which hold these response
        bytes.
        """
        self._resumed_from = last
        self._older = body
        self._events = self._events_built = events
        self.head = head

    def append(
        self,
        outputs: list[Any],
        body: list[bytes],
        events: int,
        head: Head | None = None,
        used: tuple[int, ...] = (),
    ) -> None:
        """Add engine outputs (`Output`s as lists) and the response bytes that they produced, in
        pieces that an entry does not split: whole numbered events of a stream, otherwise of at most
        `ENTRY_BYTES`. `events` is the number of the last event so far, `used` has the numbers of a
        `Usage` so far; a `head` comes with the first bytes.
        """
        if self.state is not AttemptState.OPEN:
            return
        self._outputs += outputs
        self._body += body
        self.bytes += sum(map(len, body))
        self._events = max(self._events, events)
        if head is not None:
            self.head = self._head = head
        self._used = used or self._used
        self._mark(self)

    def stop(
        self,
        kind: State | Cause,
        reason: Reason | None = None,
        summary: Summary | None = None,
        compression_level: int | None = None,
    ) -> None:
        """Append the last entry. A `State` is the request's end, with a summary, and with a
        transcript unless its compression level is None; with a `Cause` the attempt is given up, and
        another one continues the request.
        """
        if self.state is not AttemptState.OPEN:
            return
        self.state = AttemptState.STOPPING
        if isinstance(kind, State):
            assert summary is not None
            self._last = kind, reason, summary, compression_level
        else:
            self._last = kind
        self._mark(self)

    def take(self) -> Entry | None:
        """The one entry to append next: a built entry that is not accepted yet, otherwise
        everything buffered. None while `packing` is to be done.
        """
        if not self.unaccepted and self.pending and self._closing is None:
            self._build()
        return self.unaccepted[0] if self.unaccepted else None

    def _build(self) -> None:
        outputs, body = self._next_outputs(), self._next_body()
        last: Cause | _End | None = None
        if not (self._outputs or self._body):
            last, self._last = self._last, None
        ending = last if isinstance(last, tuple) else None
        self._seq += 1
        entry = Entry.output(
            self.last_built,
            self.nonce,
            self._head,
            outputs,
            body,
            self._events_built,
            self._resumed_from,
            last if isinstance(last, Cause) else None,
            encode_used(self._used) if ending or not self._outputs else b"",
        )
        if body is not None:
            self._resumed_from = None  # readers are only told of entries with bytes
        self._head = None
        if ending is None:
            self.unaccepted.append(entry)
            return
        self._closing = entry, ending
        *_, level = ending
        if level is None:
            self.packed(None)
            return
        bodies = chain((self._older,), self.history.bodies(), (entry.body,))
        self.packing = partial(compress, bodies, level)
        if (len(self._older) + self.bytes) * max(1, level) <= timings.PACK_AT_ONCE_BYTES:
            self.packed(self.packing())

    def packed(self, transcript: bytes | None) -> None:
        """The transcript is packed (None: not kept as one), so the end can be appended."""
        self.packing = None
        if self._closing is not None:  # otherwise it was fenced meanwhile
            entry, (state, reason, summary, _) = self._closing
            self._closing = None
            self.unaccepted.append(entry)
            how = state, reason, summary, transcript, self.head
            self.ending = entry.terminal_behind(*how), summary

    def ends_with(self, entry: Entry) -> bool:
        """Whether this is the last output, which is appended together with the terminal entry, so
        that a newer epoch fences both.
        """
        return self.ending is not None and entry is self.unaccepted[-1]

    def _next_outputs(self) -> bytes:
        """The outputs of the next entry as JSON. Of many, a part: bytes come behind all outputs
        that they came of, so that a later attempt has these.
        """
        if not self._outputs:
            return b""
        many = min(timings.ENTRY_OUTPUTS, len(self._outputs))
        while len(found := encode_outputs(self._outputs[:many])) > timings.ENTRY_BYTES and many > 1:
            many //= 2
        del self._outputs[:many]
        self.bytes += len(found)
        return found

    def _next_body(self) -> bytes | None:
        """The response bytes of the next entry."""
        if self._outputs or not self._body:
            return None
        size = many = 0
        for piece in self._body:
            size += len(piece)
            if many and size > timings.ENTRY_BYTES:
                break
            many += 1
        body = b"".join(self._body[:many])
        del self._body[:many]
        streamed = self._events > 0
        self._events_built = (
            self._events_built + events_in(body) if self._body and streamed else self._events
        )
        return body

    def accepted(self, entry: Entry) -> None:
        """Redis holds the entry."""
        if self.unaccepted and self.unaccepted[0].id == entry.id:
            self.unaccepted.popleft()
        self.history.add(entry)

    def restart_after(self, last: EntryId) -> None:
        """Redis holds nothing after `last`, so later entries must be appended again."""
        lost = self.history.take_after(last)
        while self.unaccepted and self.unaccepted[0].id <= last:
            self.history.add(self.unaccepted.popleft())
        self.unaccepted.extendleft(reversed(lost))

    def close(self, fenced: bool) -> None:
        """Redis has accepted the end of the request, or the attempt is fenced: forget the rest."""
        if self.state in (AttemptState.ENDED, AttemptState.FENCED):
            return
        self.state = AttemptState.FENCED if fenced else AttemptState.ENDED
        self.unaccepted.clear()
        self._outputs, self._body, self._older, self.history = [], [], b"", History()
        self.ending = self._head = self._last = self._closing = self.packing = None
        if self.closed.done():
            return
        if fenced:
            self.closed.set_exception(Fenced(f"{self.request_id}: epoch {self.epoch} is fenced"))
            self.closed.exception()  # retrieve it; a caller that awaits it still gets it
        else:
            self.closed.set_result(None)


class Pause:
    """The pause behind a turn of the journal's writer, in which an engine keeps what its running
    requests make: several outputs of a request become one, which costs what an output of one token
    costs (ADR 26).

    For each entry of a turn it lasts 1/`timings.ENTRIES_PER_S`, and it ends right behind the
    engine's last step in this time, so that no output has waited for nothing. There is none if
    fewer than two steps fit in: nothing would be merged. No output waits longer than `longest_s`.

    `on`: whether outputs of the next step wait.
    """

    def __init__(self, longest_s: float = 0.0) -> None:
        self.on = False
        self._longest_s = longest_s
        self._until_s = self._first_s = self._stepped_s = -math.inf
        self._step_s = math.inf
        self._wakes: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, entries: int) -> None:
        """A turn of the writer appends so many entries."""
        until_s = asyncio.get_running_loop().time() + entries / timings.ENTRIES_PER_S
        self._until_s = max(self._until_s, until_s)
        self.on = self.on or self._two_steps_fit()

    def stepped(self) -> None:
        """The engine has made a step, and handed over its outputs."""
        now_s = asyncio.get_running_loop().time()
        self._step_s, self._stepped_s = now_s - self._stepped_s, now_s
        if not self._wakes:
            self.on = self.on and self._two_steps_fit()
        elif not self._fits(self._first_s, now_s + self._step_s):
            self.end()

    def _two_steps_fit(self) -> bool:
        next_s = self._stepped_s + self._step_s
        return self._fits(next_s, next_s + self._step_s)

    def _fits(self, first_s: float, step_s: float) -> bool:
        """Whether outputs that wait since `first_s` may wait for a step at `step_s`."""
        return step_s <= min(self._until_s, first_s + _PLANNED_SHARE * self._longest_s)

    def holds(self, wake: Callable[[], None]) -> bool:
        """Whether a running request's new output waits (hot path); it is asked for the first of
        those that wait. What a client waits for must not: the first output of a request, its end,
        an error. `wake` is called at the end of the pause.
        """
        if not self.on:
            return False
        if not self._wakes:
            loop = asyncio.get_running_loop()
            self._first_s = loop.time()
            self._timer = loop.call_later(self._longest_s, self.end)
        self._wakes.append(wake)
        return True

    def end(self) -> None:
        """Wake everybody whose outputs wait."""
        if self._timer is not None:
            self._timer.cancel()
        self.on = False
        wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake()


class History:
    """The entries of an attempt that Redis has accepted, in the order of their ids: they are kept
    until the request ends, to restore a Redis that comes back with older data.

    A token takes some 800 bytes as an entry in Python, and 30 packed. The last entries are not
    packed yet, and what comes in large pieces never is: it would hold the event loop for 10 ms a
    MiB, and is usually an answer that is no stream and ends with it.
    """

    def __init__(self) -> None:
        self._blocks: list[tuple[EntryId, int, bytes | list[Entry]]] = []
        """The id of the last entry, what they take, and the entries, packed or not."""
        self._blocks_bytes = 0
        self._recent: list[Entry] = []
        self._recent_bytes = 0

    @property
    def memory_bytes(self) -> int:
        """About how much memory this takes."""
        return self._blocks_bytes + self._recent_bytes

    def __iter__(self) -> Iterator[Entry]:
        for *_, block in self._blocks:
            yield from _unpacked(block)
        yield from self._recent

    def bodies(self) -> Iterator[bytes]:
        """All response bytes that are there now, in large pieces; any thread may take them."""
        recent = _bodies_in(self._recent)
        return chain((_bodies_in(block) for *_, block in list(self._blocks)), (recent,))

    def add(self, entry: Entry) -> None:
        self._recent.append(entry)
        self._recent_bytes += _OTHER_BYTES + len(entry.body) + len(entry.outputs or b"")
        if self._recent_bytes >= timings.PACK_BYTES:
            block: bytes | list[Entry] = self._recent
            size = self._recent_bytes
            if size <= timings.PACK_AT_MOST_BYTES:
                block = _packed(self._recent)
                size = len(block)
            self._blocks.append((entry.id, size, block))
            self._blocks_bytes += size
            self._recent, self._recent_bytes = [], 0

    def take_after(self, last: EntryId) -> list[Entry]:
        """Remove the entries after `last`, and return them."""
        entries = self._recent
        while self._blocks and self._blocks[-1][0] > last:
            _, size, block = self._blocks.pop()
            self._blocks_bytes -= size
            entries = _unpacked(block) + entries
        self._recent, self._recent_bytes = [], 0
        for entry in entries:
            if entry.id <= last:
                self.add(entry)
        return [entry for entry in entries if entry.id > last]


def _packed(entries: list[Entry]) -> bytes:
    flat = [(*entry.id, entry.fields) for entry in entries]
    return zlib.compress(_encoder.encode(flat), 1)


def _unpacked(block: bytes | list[Entry]) -> list[Entry]:
    if isinstance(block, list):
        return block
    flat = _decoder.decode(zlib.decompress(block))
    return [Entry(EntryId(epoch, seq), fields) for epoch, seq, fields in flat]


def _bodies_in(block: bytes | list[Entry]) -> bytes:
    return b"".join([entry.body for entry in _unpacked(block)])
