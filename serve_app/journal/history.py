"""The entries of an attempt that Redis has accepted, packed: they are kept until the request ends,
to restore a Redis that comes back with older data. Pure.

A token takes some 800 bytes as an entry in Python, and 30 packed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import msgspec

from serve_app import timings
from serve_app.journal.entries import Entry
from serve_app.journal.ids import EntryId

_Packable = list[tuple[int, int, dict[bytes, bytes]]]
_OTHER_BYTES = 550
"""An entry's memory besides response bytes and outputs: Python's objects, and short values."""
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Packable)


class History:
    """Entries in the order of their ids. The last ones are not packed yet."""

    __slots__ = ("_blocks", "_packed_bytes", "_recent", "_recent_bytes")

    def __init__(self) -> None:
        self._blocks: list[tuple[EntryId, bytes]] = []
        """Packed entries, with the id of the last."""
        self._packed_bytes = 0
        self._recent: list[Entry] = []
        self._recent_bytes = 0

    @property
    def memory_bytes(self) -> int:
        """About how much memory this takes."""
        return self._packed_bytes + self._recent_bytes

    def __iter__(self) -> Iterator[Entry]:
        for _, block in self._blocks:
            yield from _unpacked(block)
        yield from self._recent

    def bodies(self) -> Iterator[bytes]:
        """All response bytes, in large pieces."""
        for _, block in self._blocks:
            yield b"".join([entry.body for entry in _unpacked(block)])
        yield b"".join([entry.body for entry in self._recent])

    def add(self, entry: Entry) -> None:
        self._recent.append(entry)
        self._recent_bytes += _OTHER_BYTES + len(entry.body) + len(entry.outputs or b"")
        if self._recent_bytes >= timings.PACK_BYTES:
            block = _packed(self._recent)
            self._blocks.append((entry.id, block))
            self._packed_bytes += len(block)
            self._recent, self._recent_bytes = [], 0

    def take_after(self, last: EntryId) -> list[Entry]:
        """Remove the entries after `last`, and return them."""
        entries = self._recent
        while self._blocks and self._blocks[-1][0] > last:
            _, block = self._blocks.pop()
            self._packed_bytes -= len(block)
            entries = _unpacked(block) + entries
        self._recent, self._recent_bytes = [], 0
        for entry in entries:
            if entry.id <= last:
                self.add(entry)
        return [entry for entry in entries if entry.id > last]


def _packed(entries: list[Entry]) -> bytes:
    flat = [(*entry.id, entry.fields) for entry in entries]
    return zlib.compress(_encoder.encode(flat), 1)


def _unpacked(block: bytes) -> list[Entry]:
    flat = _decoder.decode(zlib.decompress(block))
    return [Entry(EntryId(epoch, seq), fields) for epoch, seq, fields in flat]
