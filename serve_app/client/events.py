"""Complete server-sent events from the bytes of one or several connections."""

from __future__ import annotations

from collections.abc import Iterator

import httpx

_FINAL_EVENTS = (
    b"response.completed",
    b"response.incomplete",
    b"response.failed",
    b"error",
    b"response",
)


class EventSplitter:
    """Splits bytes into complete server-sent events, each number once and in order. A comment is
    passed on as soon as it is complete.

    `last` is the number of the last event passed on; `finished`: it was the stream's final event;
    `part`: the bytes of the next event so far. `numbered` is False once an event had no number,
    because the stream then cannot be resumed.
    """

    def __init__(self, last: int = 0) -> None:
        self.last, self.finished, self.numbered, self.part = last, False, True, b""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The events that this chunk completes; raises `httpx.ProtocolError` if one is missing."""
        self.part += chunk
        while True:
            # Pass on comments without a blank line, which openai's SDK (3.52) would treat as an
            # event without data.
            separator = b"\n" if self.part.startswith((b":", b"\n")) else b"\n\n"
            block, end, rest = self.part.partition(separator)
            if not end:
                return
            self.part = rest
            if block and self._is_new(block):
                yield block + end

    def _is_new(self, block: bytes) -> bool:
        fields = {
            name: value.strip()
            for name, _, value in (line.partition(b":") for line in block.split(b"\n"))
        }
        if not fields.keys() & {b"id", b"event", b"data"}:
            return True
        final = fields.get(b"data") == b"[DONE]" or fields.get(b"event") in _FINAL_EVENTS
        number = int(fields[b"id"]) if fields.get(b"id", b"").isdigit() else 0
        if number > self.last + 1 or (not number and self.last):
            raise httpx.ProtocolError(
                f"Event {number or 'without a number'} of the stream followed event {self.last}."
            )
        if 0 < number <= self.last:
            if final and not self.finished:
                raise httpx.ProtocolError(
                    f"The stream ends before event {self.last}, which has been received."
                )
            return False
        self.last, self.numbered, self.finished = (
            number,
            self.numbered and number > 0,
            self.finished or final,
        )
        return True
