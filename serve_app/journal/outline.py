"""The few entries of a journal that say in which state a request is: for all who need neither its body nor its output.

They are the request itself, every opening, every seal, and the last entry. A journal has one opening for each attempt,
so that this is a handful of small ranges, however long the response is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from serve_app.journal.bodies import without_bytes
from serve_app.journal.connection import Command
from serve_app.journal.entries import (
    REQUEST_ID,
    AttemptFacts,
    Entry,
    EntryId,
    RequestFacts,
    Summary,
    decode_facts,
    entry_from_redis,
    seal_id,
)


def first_questions(key: str) -> list[Command]:
    """All that there is to ask of a journal with one attempt, as most are."""
    return [
        _one(key, REQUEST_ID),
        *more_questions(key, (1,)),
        # Two: a seal may stand right before what somebody else has closed the journal with.
        ("XREVRANGE", key, "+", "-", "COUNT", "2"),
    ]


def more_questions(key: str, epochs: Iterable[int]) -> list[Command]:
    """The openings and seals of these attempts."""
    return [_one(key, entry_id) for epoch in epochs for entry_id in (EntryId(epoch, 0), seal_id(epoch))]


def epochs_left(entries: Sequence[Entry]) -> range:
    """The attempts whose openings and seals the first answers did not hold."""
    return range(2, max((entry.id.epoch for entry in entries if not entry.terminal), default=0) + 1)


def put_together(replies: Sequence[Any]) -> list[Entry]:
    """The entries that the answers hold, in order, each once and without its bytes."""
    found = {entry.id: entry for reply in replies for entry in map(entry_from_redis, reply)}
    last = max(found, default=None)
    kept = (found[at] for at in sorted(found) if at in (REQUEST_ID, last) or at.seq == 0 or found[at].ends)
    return [without_bytes(entry) for entry in kept]


def summary_of(entries: Sequence[Entry], ended_ms: int) -> Summary:
    """What a terminal entry from outside says of the request; an outline of its journal tells all of it."""
    opened = [entry for entry in entries if entry.id.epoch > 0 and entry.id.seq == 0]
    return Summary(
        request=decode_facts(entries[0], RequestFacts) if entries else None,
        attempt=decode_facts(opened[-1], AttemptFacts) if opened else None,
        attempts=opened[-1].id.epoch if opened else 0,
        ended_ms=ended_ms,
    )


def _one(key: str, entry_id: EntryId) -> Command:
    return ("XRANGE", key, str(entry_id), str(entry_id))
