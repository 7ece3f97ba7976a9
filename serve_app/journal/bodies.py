"""Stores a request's body under a Redis key of its own, so that reading a state does not read the
body. Pure.

`{ns}:b:<request_id>` is written with entry 0-1, in the same transaction and with the same expiry.
The worker that opens an attempt reads it, and the end of the request deletes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.journal.entries import Entry
from serve_app.journal.ids import REQUEST_ID


def with_body(entries: Sequence[Entry], body: bytes | None) -> list[Entry]:
    """The journal with the body put back into the request's entry. `None` as the body: its Redis
    key is gone.
    """
    if not entries or entries[0].id != REQUEST_ID or body is None:
        return list(entries)
    return [entries[0].with_body(body), *entries[1:]]
