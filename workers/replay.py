"""What older attempts have left in a journal, for a new attempt to go on from. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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


_outputs = msgspec.json.Decoder(list[Output])


@dataclass(frozen=True, slots=True)
class Recorded:
    """The part of a response that is in the journal.

    `last`: the entry that it ends with; `body`: the response bytes, numbered; `fingerprint`: of the engine that
    produced it.
    """

    last: EntryId = REQUEST_ID
    outputs: list[Output] = field(default_factory=list)
    body: bytes = b""
    events: int = 0
    head: Head | None = None
    fingerprint: str = ""

    @property
    def seen(self) -> bool:
        """Whether a client may have seen bytes that came of the model's output: these cannot be taken back."""
        return bool(self.outputs and self.body)


def recorded(entries: Sequence[Entry]) -> Recorded:
    """What counts of a journal whose last entry is the opening of a new attempt.

    A part that was restarted (its first output names an entry before the outputs of older epochs) replaces them.
    """
    last, outputs, body, events, head, fingerprint = REQUEST_ID, [], [], 0, None, ""  # type: ignore[var-annotated]
    for entry in entries[:-1]:
        last = entry.id
        if entry.id.epoch == 0:
            continue
        if entry.id.seq == 0:
            opened = decode_facts(entry, AttemptFacts)
            continue
        if entry.resumed_from == REQUEST_ID:
            outputs, body, events, head = [], [], 0, None
        if b"o" in entry.fields:
            outputs += _outputs.decode(entry.fields[b"o"])
            fingerprint = opened.fingerprint
        if entry.body:
            body.append(entry.body)
        events = max(events, entry.events)
        head = head or entry.head
    return Recorded(last, outputs, b"".join(body), events, head, fingerprint)
