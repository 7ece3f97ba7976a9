"""Determines from a journal what a new attempt can continue from. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from serve_app.contract import NotResumed, Reason
from serve_app.journal.entries import REQUEST_ID, AttemptFacts, Entry, EntryId, Head, decode_facts
from serve_app.journal.usage import Usage


class AnswerTooLarge(Exception):
    """An answer has more bytes than the journal may hold of one."""

    reason = Reason.ANSWER_TOO_LARGE
    why = ""


class CannotContinue(Exception):
    """A client has seen a part of a response that cannot be continued exactly.

    Args:
        why: completes the sentence "It cannot be continued, because …" for the caller.
    """

    reason = Reason.ATTEMPT_LOST

    def __init__(self, cause: NotResumed, why: str) -> None:
        super().__init__(why)
        self.cause = cause
        self.why = why


TokenLogprobs = list[tuple[int, float | None, int | None, str | None]]
"""Of one position, the sampled token first: id, log probability (None: minus infinity), rank and
text of each token.
"""


class Output(msgspec.Struct, array_like=True, frozen=True):
    """One engine output, a delta, as in an entry's field `o`.

    `index`: which of `n` sequences, or, negative, which generation behind the first;
    `cached_tokens`, `cache_writes`: of the prompt, found in the prefix cache and added to it, with
    the first output; `beside`: which of the `n` sequences of a later generation;
    `prompt_token_ids`: with the first output, where a later attempt might make another prompt of
    the same request. What follows `cached_tokens` is only there if it has another value than here.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    cached_tokens: int | None
    cache_writes: int = 0
    beside: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    prompt_token_ids: list[int] | None = None

    @property
    def generation(self) -> int:
        """Which of the request's generations, from 0."""
        return max(0, -self.index)

    @property
    def sequence(self) -> int:
        """Which of the generation's `n` sequences, from 0."""
        return self.beside if self.index < 0 else self.index


_outputs = msgspec.json.Decoder(list[Output])


@dataclass(frozen=True, slots=True)
class Recorded:
    """The part of a response that is in the journal.

    `last`: its last output; `body`: the response bytes, numbered; `bytes`: the size of outputs and
    response; `usage`: what it took; `fingerprint`: of the engine that produced it; `complete`:
    whether nothing in between is missing, as can happen when Redis came back with older data;
    `began_ms`: when the first attempt was opened.
    """

    last: EntryId = REQUEST_ID
    outputs: list[Output] = field(default_factory=list)
    body: bytes = b""
    events: int = 0
    head: Head | None = None
    fingerprint: str = ""
    bytes: int = 0
    complete: bool = True
    usage: Usage = field(default_factory=Usage)
    began_ms: int = 0

    def prompt(self, generation: int, made: Any) -> Any:
        """The prompt of a generation: the recorded one, or what this attempt has made."""
        for output in self.outputs:
            if output.generation == generation and output.prompt_token_ids:
                return {**made, "prompt_token_ids": output.prompt_token_ids}
        return made

    @property
    def seen(self) -> bool:
        """Whether a client may have seen bytes that came from the model; these cannot be taken
        back.
        """
        return bool(self.outputs and self.body)


def recorded(entries: Sequence[Entry]) -> Recorded:
    """The recorded part of the response, from a journal whose last entry is the opening of the new
    attempt.
    """
    effective, complete = effective_entries(entries[:-1])
    opened = {
        entry.id.epoch: decode_facts(entry, AttemptFacts) for entry in entries if entry.id.opens
    }
    outputs: list[Output] = []
    fingerprint = ""
    for entry in effective:
        if entry.outputs is not None:
            outputs += _outputs.decode(entry.outputs)
            by = opened.get(entry.id.epoch)
            fingerprint = by.fingerprint if by is not None else ""
    head = next((entry.head for entry in effective if entry.head), None)
    if head is not None and not head.streamed:  # no reader uses its bytes before the end
        body, head = b"", None
    else:
        body = b"".join(entry.body for entry in effective)
    used = next((entry.used for entry in reversed(effective) if entry.used), b"")
    return Recorded(
        last=effective[-1].id if effective else REQUEST_ID,
        outputs=outputs,
        body=body,
        events=max((entry.events for entry in effective), default=0),
        head=head,
        fingerprint=fingerprint,
        bytes=sum(len(entry.outputs or b"") + len(entry.body) for entry in effective),
        complete=complete,
        usage=Usage.decode(used)._replace(output=sum(len(one.token_ids) for one in outputs)),
        began_ms=next(iter(opened.values())).opened_ms,
    )


def effective_entries(entries: Sequence[Entry]) -> tuple[list[Entry], bool]:
    """The last entry with output and all entries that it continues from; and whether this chain is
    complete.

    An attempt's first output names the entry that it continues from. Older entries after that one
    do not count; if the attempt started again, no older entries count. A Redis that failed over may
    have lost entries of an attempt whose worker is dead, while those of a later attempt were
    appended again.
    """
    produced: dict[EntryId, tuple[Entry, EntryId | None]] = {}
    """Each entry with output, and its predecessor; None if the journal lacks that."""
    lasts: dict[EntryId | None, EntryId] = {None: REQUEST_ID, REQUEST_ID: REQUEST_ID}
    before = last = REQUEST_ID
    for entry in entries:
        follows = entry.id.is_next_to(before)
        before = entry.id
        if entry.id.epoch > 0 and not entry.id.opens and entry.produced:
            predecessor = last if last.epoch == entry.id.epoch else lasts.get(entry.resumed_from)
            produced[entry.id] = entry, predecessor if follows else None
            last = entry.id
        lasts[entry.id] = last
    effective: list[Entry] = []
    at: EntryId | None = last
    while at is not None and at != REQUEST_ID:
        entry, at = produced[at]
        effective.append(entry)
    return effective[::-1], at is not None
