"""What older attempts have left in a journal, for a new attempt to go on from. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from serve_app.journal.entries import REQUEST_ID, AttemptFacts, Entry, EntryId, Head, decode_facts


class CannotContinue(Exception):
    """A response of which a client has seen a part cannot be continued exactly."""


class Output(msgspec.Struct, array_like=True, frozen=True):
    """One engine output, as an entry's field `o` holds it: a delta."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    cached_tokens: int | None


_PRODUCED = {b"o", b"b", b"h"}
_outputs = msgspec.json.Decoder(list[Output])


@dataclass(frozen=True, slots=True)
class Recorded:
    """The part of a response that is in the journal.

    `last`: the output that it ends with; `body`: the response bytes, numbered; `fingerprint`: of the engine that
    produced it; `whole`: whether nothing is missing in between, as after a Redis that came back older.
    """

    last: EntryId = REQUEST_ID
    outputs: list[Output] = field(default_factory=list)
    body: bytes = b""
    events: int = 0
    head: Head | None = None
    fingerprint: str = ""
    whole: bool = True

    @property
    def seen(self) -> bool:
        """Whether a client may have seen bytes that came of the model's output: these cannot be taken back."""
        return bool(self.outputs and self.body)


def recorded(entries: Sequence[Entry]) -> Recorded:
    """What counts of a journal whose last entry is the opening of a new attempt."""
    counted, whole = _that_count(entries[:-1])
    outputs: list[Output] = []
    fingerprint = ""
    for entry, opened_by in counted:
        if b"o" in entry.fields:
            outputs += _outputs.decode(entry.fields[b"o"])
            fingerprint = opened_by
    return Recorded(
        last=counted[-1][0].id if counted else REQUEST_ID,
        outputs=outputs,
        body=b"".join(entry.body for entry, _ in counted),
        events=max((entry.events for entry, _ in counted), default=0),
        head=next((entry.head for entry, _ in counted if entry.head), None),
        fingerprint=fingerprint,
        whole=whole,
    )


class _Produced(NamedTuple):
    """An entry with output, by which engine, and what it goes on from; None where the journal lacks that."""

    entry: Entry
    fingerprint: str
    behind: EntryId | None


def _that_count(entries: Sequence[Entry]) -> tuple[list[tuple[Entry, str]], bool]:
    """The last entry with output and all that it goes on from, each with its engine; and whether that is there whole.

    An attempt's first output names what it goes on from: older ones behind that do not count, which is all of them
    where it began anew. A Redis that failed over may have lost entries of an attempt whose worker is dead, while those
    of a later one were appended again.
    """
    produced: dict[EntryId, _Produced] = {}
    lasts: dict[EntryId | None, EntryId] = {None: REQUEST_ID, REQUEST_ID: REQUEST_ID}
    before, last, fingerprint = REQUEST_ID, REQUEST_ID, ""
    for entry in entries:
        follows = entry.id.epoch == before.epoch and entry.id.seq == before.seq + 1
        before = entry.id
        if entry.id.seq == 0:
            fingerprint = decode_facts(entry, AttemptFacts).fingerprint
        elif entry.id.epoch > 0 and entry.fields.keys() & _PRODUCED:
            behind = last if last.epoch == entry.id.epoch else lasts.get(entry.resumed_from)
            produced[entry.id] = _Produced(entry, fingerprint, behind if follows else None)
            last = entry.id
        lasts[entry.id] = last
    counted: list[tuple[Entry, str]] = []
    at: EntryId | None = last
    while at is not None and at != REQUEST_ID:
        counted.append((produced[at].entry, produced[at].fingerprint))
        at = produced[at].behind
    return counted[::-1], at is not None
