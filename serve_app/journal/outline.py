"""The few entries of a journal that determine a request's state, for callers that need neither its
body nor its output.

They are the request itself, every opening, every seal, and the last two entries. A journal has one
opening per attempt, so reading them takes a few small ranges, however long the response is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from serve_app.contract import State, Written
from serve_app.journal.entries import Entry, decode_facts, entry_from_redis, openings
from serve_app.journal.facts import AttemptFacts, RequestFacts, Summary
from serve_app.journal.ids import REQUEST_ID, EntryId, opening_id, seal_id
from serve_app.journal.usage import Usage
from serve_app.redis.connection import Command


def first_questions(key: str) -> list[Command]:
    """The commands that suffice for a journal with one attempt, as most have."""
    return [
        _one(key, REQUEST_ID),
        *more_questions(key, (1,)),
        # Two, because what stands before an opening or a terminal entry from outside may be a
        # seal, and says how many events there are.
        ("XREVRANGE", key, "+", "-", "COUNT", "2"),
    ]


def more_questions(key: str, epochs: Iterable[int]) -> list[Command]:
    """The commands for the openings and seals of these attempts."""
    return [
        _one(key, entry_id) for epoch in epochs for entry_id in (opening_id(epoch), seal_id(epoch))
    ]


def epochs_left(entries: Sequence[Entry]) -> range:
    """The attempts whose openings and seals are missing in the first answers."""
    return range(2, max((entry.id.epoch for entry in entries if not entry.terminal), default=0) + 1)


def put_together(replies: Sequence[Any]) -> list[Entry]:
    """The entries in the answers, in order, each once and without its bytes."""
    found = {entry.id: entry for reply in replies for entry in map(entry_from_redis, reply)}
    return [found[at].without_bytes() for at in sorted(found)]


def summary_of(entries: Sequence[Entry], ended_ms: int) -> Summary:
    """The summary in a terminal entry that is written from outside; an outline of the journal is
    enough for it.
    """
    opened = openings(entries)
    return Summary(
        request=decode_facts(entries[0], RequestFacts) if entries else None,
        attempt=decode_facts(opened[-1], AttemptFacts) if opened else None,
        attempts=opened[-1].id.epoch if opened else 0,
        ended_ms=ended_ms,
        began_ms=decode_facts(opened[0], AttemptFacts).opened_ms if opened else 0,
    )


def used_by_end(last: Entry, summary: Summary) -> Usage:
    """What a request has used, by the entry that has ended it.

    Raises:
        ValueError: the entry cannot be decoded.
    """
    return Usage.decode(last.used) if last.used else Usage(output=summary.output_tokens)


def written(last: Entry) -> Written | None:
    """What a request has written, by the last entry of its journal.

    Returns:
        None if the request has not ended, or the entry is unreadable.
    """
    try:
        summary = last.summary
        used = used_by_end(last, summary) if summary else Usage()
    except (msgspec.DecodeError, LookupError, ValueError):
        return None
    if summary is None:
        return None
    whole = last.state is State.COMPLETED and used.output > 0
    return Written(used.output, whole, summary.attempts > 0, used.prompt)


def _one(key: str, entry_id: EntryId) -> Command:
    return ("XRANGE", key, str(entry_id), str(entry_id))
