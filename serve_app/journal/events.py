"""Response bytes in a journal, and the server-sent events in them: numbers the events, and skips
those that a reader has. Pure.

In an event, three characters that JSON may hold as they are are written as escapes. To many clients
they end a line (`str.splitlines`, httpx's `iter_lines`), and so would cut an event in two.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import zlib

from serve_app.errors import invalid

SEPARATOR = b"\n\n"
DONE = b"data: [DONE]\n\n"
PIECE_BYTES = 64 * 1024
_INPUT_BYTES = 16 * 1024
_ENDS_OF_LINES = [
    ("\u0085".encode(), b"\\u0085"),
    ("\u2028".encode(), b"\\u2028"),
    ("\u2029".encode(), b"\\u2029"),
]
"""What may stand in JSON and ends a line elsewhere, as UTF-8 and as JSON escapes it."""


def escaped(data: bytes) -> bytes:
    """JSON, or whole events of it, in which nothing but a line feed ends a line (hot path)."""
    if not data.isascii():
        for character, escape in _ENDS_OF_LINES:
            data = data.replace(character, escape)
    return data


def events_in(body: bytes) -> int:
    """Number of complete events in these bytes; comments do not count."""
    return sum(not event.startswith(b":") for event in body.split(SEPARATOR)[:-1])


class EventNumberer:
    """Puts an `id:` line before every event of one response: 1, 2, 3, ..."""

    __slots__ = ("_tail", "last")

    def __init__(self) -> None:
        self.last = 0
        self._tail = b""

    def number(self, chunk: bytes) -> bytes:
        """The chunk with `id:` lines, its data in one line each. An event that is split over chunks
        is held back until it is complete.
        """
        if not self._tail and chunk.endswith(SEPARATOR) and chunk.count(SEPARATOR) == 1:
            if chunk[0] == 0x3A:  # a comment is no event
                return chunk
            self.last += 1
            return b"id: %d\n%b" % (self.last, escaped(chunk))
        *events, self._tail = (self._tail + chunk).split(SEPARATOR)
        numbered = []
        for event in events:
            if event.startswith(b":"):
                numbered.append(event)
                continue
            self.last += 1
            numbered.append(b"id: %d\n%b" % (self.last, escaped(event)))
        return SEPARATOR.join([*numbered, b""]) if numbered else b""


def after_event(body: bytes, first: int, seen: int) -> bytes:
    """The part of `body` after event number `seen`; the first event in it has number `first`."""
    skip = seen - first + 1
    return _Skipper(skip).rest(body) if skip > 0 else body


def last_event_id(text: str | None) -> int:
    """The number in `Last-Event-ID`: of the last event that the client has; 0 if it has none."""
    if text is None or text == "":
        return 0
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise invalid(
            "The header Last-Event-ID must be the number of an event.",
            param="last-event-id",
        )
    return int(text)


class _Skipper:
    """Skips the first events of a response that comes in chunks."""

    __slots__ = ("_left", "_tail")

    def __init__(self, events: int) -> None:
        self._left = events
        self._tail = b""

    def rest(self, chunk: bytes) -> bytes:
        """What comes behind these events. One that is split over chunks is held back until it is
        complete.
        """
        if not self._left:
            return chunk
        events, position = self._tail + chunk, 0
        while self._left:
            end = events.find(SEPARATOR, position)
            if end < 0:
                self._tail = events[position:]
                return b""
            if not events.startswith(b":", position):  # a comment is no event
                self._left -= 1
            position = end + len(SEPARATOR)
        self._tail = b""
        return events[position:]


class Pieces:
    """The response bytes after the event that the reader already has, decompressed only as fast as
    they are consumed, because many clients may read long transcripts slowly at the same time.

    Args:
        packed: the transcript, as in the terminal entry.
        seen_events: 0 for all of it.
    """

    def __init__(self, packed: bytes, seen_events: int = 0) -> None:
        self.done = False
        self._packed = memoryview(packed)
        self.packed_bytes = len(packed)
        self._position = 0
        self._inflater = zlib.decompressobj()
        self._skipper = _Skipper(seen_events)

    def take(self) -> bytes:
        """The next bytes, about `PIECE_BYTES` at most; empty at the end."""
        while not self.done:
            if piece := self._skipper.rest(self._inflate()):
                return piece
        return b""

    def _inflate(self) -> bytes:
        data = self._inflater.unconsumed_tail
        if not data:
            data = bytes(self._packed[self._position : self._position + _INPUT_BYTES])
            self._position += len(data)
        piece = self._inflater.decompress(data, PIECE_BYTES)
        self.done = self._inflater.eof or not (piece or data)
        return piece
