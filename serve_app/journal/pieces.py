"""Decompresses a transcript only as fast as its reader consumes it, because many clients may read
long transcripts slowly at the same time.

Pure.
"""

from __future__ import annotations

import zlib

from serve_app.journal.events import SEPARATOR

PIECE_BYTES = 64 * 1024
_INPUT_BYTES = 16 * 1024


class Pieces:
    """The response bytes after the event that the reader already has.

    Args:
        packed: the transcript, as in the terminal entry.
        seen_events: 0 for all of it.
    """

    def __init__(self, packed: bytes, seen_events: int = 0) -> None:
        self.done = False
        self._packed = memoryview(packed)
        self._position = 0
        self._inflater = zlib.decompressobj()
        self._seen_events = seen_events
        self._tail = b""

    def take(self) -> bytes:
        """The next bytes, about `PIECE_BYTES` at most; empty at the end."""
        while not self.done:
            piece = self._inflate()
            if self._seen_events and piece:
                piece = self._behind_the_seen(self._tail + piece)
            if piece:
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

    def _behind_the_seen(self, events: bytes) -> bytes:
        position = 0
        while self._seen_events:
            end = events.find(SEPARATOR, position)
            if end < 0:
                self._tail = events[position:]
                return b""
            if not events.startswith(b":", position):  # a comment is no event
                self._seen_events -= 1
            position = end + len(SEPARATOR)
        self._tail = b""
        return events[position:]
