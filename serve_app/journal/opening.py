"""The question with which a worker opens an attempt: it appends the opening, then reads the journal
and the request's body. What is longer than at most first attempts is read apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from serve_app import timings
from serve_app.errors import Fenced
from serve_app.journal.entries import Entry, entry_from_redis, flatten
from serve_app.journal.facts import AttemptFacts
from serve_app.journal.ids import REQUEST_ID, opening_id
from serve_app.redis.connection import Command
from serve_app.redis.replies import Reply, all_answered, answered, is_refused_for_now


def with_body(entries: Sequence[Entry], body: bytes | None) -> list[Entry]:
    """The journal with the body put back into the request's entry. `None` as the body: its Redis
    key is gone.
    """
    if not entries or entries[0].id != REQUEST_ID or body is None:
        return list(entries)
    return [entries[0].with_body(body), *entries[1:]]


_ENTRIES = 2
"""The request and the opening: all that a first attempt finds."""


def questions(
    key: str, body_key: str, epoch: int, nonce: bytes, facts: AttemptFacts
) -> list[Command]:
    """The commands that open the attempt, and read a short journal and a small body."""
    opening = Entry.opening(epoch, nonce, facts)
    return [
        ("XADD", key, "NOMKSTREAM", str(opening.id), *flatten(opening)),
        ("XRANGE", key, "-", "+", "COUNT", _ENTRIES + 1),
        ("GETRANGE", body_key, 0, timings.LARGE_BYTES),
    ]


def long_questions(key: str, body_key: str) -> list[Command]:
    """The commands that read all of both."""
    return [("XRANGE", key, "-", "+"), ("GET", body_key)]


def is_whole(replies: Sequence[Reply]) -> bool:
    """Whether the first answers hold everything. An empty body may be one that is gone."""
    return not any(isinstance(reply, Exception) for reply in replies[1:]) and (
        len(replies[1]) <= _ENTRIES and 0 < len(replies[2]) <= timings.LARGE_BYTES
    )


def read_answers(
    request_id: str, epoch: int, nonce: bytes, replies: Sequence[Reply]
) -> list[Entry]:
    """The journal, whose last entry is the opening; its first entry holds the body.

    Raises:
        Fenced: the journal is gone or has ended, or a newer epoch or another writer owns it.
        RedisUnavailable: Redis rejects the opening for now.
    """
    added, raw, body = replies
    all_answered((raw, body), what=f"reading {request_id}")
    entries = with_body([entry_from_redis(item) for item in raw], body)
    # The journal decides, not the answer to the append: a retry and a rival's get the same error.
    if not entries or entries[-1].id != opening_id(epoch) or entries[-1].nonce != nonce:
        if is_refused_for_now(added):
            answered(added, what=f"opening {request_id}")
        raise Fenced(f"{request_id}: epoch {epoch} is not ours")
    return entries
