"""Wake-ups: accepted entries on their way to the ingress that holds the connection. Pure.

A message on the pub/sub channel `{ns}:w:<ingress id>` is a MessagePack array of wake-ups. Each is
an array of request id, epoch, seq and the fields of the entry that a reader needs. A message may be
lost at any time, because the journal has all of its content.
"""

from __future__ import annotations

import msgspec

from serve_app.journal.entries import Entry
from serve_app.journal.ids import EntryId


class Wake(msgspec.Struct, array_like=True):
    """One accepted entry, without the fields that only workers read."""

    request_id: str
    epoch: int
    seq: int
    fields: dict[bytes, bytes]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Wake])


def wake_of(request_id: str, entry: Entry, after: str | None = None) -> Wake:
    """The wake-up for an entry.

    Args:
        after: id of the previously announced entry, if the writer knows it; entries between the two
            contain nothing that a reader needs. Empty if the writer does not know it; the reader
            then reads the stream.
    """
    return Wake(request_id, entry.id.epoch, entry.id.seq, entry.for_readers(after))


def encode_wakes(wakes: list[Wake]) -> bytes:
    return _encoder.encode(wakes)


def decode_wakes(payload: bytes) -> list[tuple[str, Entry]]:
    """`(request id, entry)` pairs of a message."""
    return [
        (wake.request_id, Entry(EntryId(wake.epoch, wake.seq), wake.fields))
        for wake in _decoder.decode(payload)
    ]
