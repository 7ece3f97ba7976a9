"""The round trip with which a worker opens an attempt: append the opening, read the journal and the request's body."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from serve_app.errors import Fenced, JournalUnavailable
from serve_app.journal.bodies import with_body
from serve_app.journal.connection import TRANSIENT, Command, Reply
from serve_app.journal.entries import AttemptFacts, Entry, entry_from_redis


def questions(key: str, body_key: str, epoch: int, nonce: bytes, facts: AttemptFacts) -> list[Command]:
    """The commands."""
    opening: list[bytes] = [b"n", nonce, b"m", msgspec.json.encode(facts)]
    return [
        ("XADD", key, "NOMKSTREAM", f"{epoch}-0", *opening),
        ("XRANGE", key, "-", "+"),
        ("GET", body_key),
    ]


def read_answers(request_id: str, epoch: int, nonce: bytes, replies: Sequence[Reply]) -> list[Entry]:
    """The journal, whose last entry is the opening; the body stands in its first.

    Raises:
        Fenced: the journal is gone, or has ended, or a newer epoch or another writer holds it.
        JournalUnavailable: Redis refused for now.
    """
    added, raw, body = replies
    for reply in (raw, body):
        if isinstance(reply, Exception):
            raise JournalUnavailable(f"reading {request_id}: {reply}")
    entries = with_body([entry_from_redis(item) for item in raw], body)
    # The reading decides, not the answer to the append: a retry of one's own looks like a rival's.
    if not entries or entries[-1].id != (epoch, 0) or entries[-1].nonce != nonce:
        if isinstance(added, Exception) and str(added).startswith(TRANSIENT):
            raise JournalUnavailable(f"opening {request_id}: {added}")
        raise Fenced(f"{request_id}: epoch {epoch} is not ours")
    return entries
