"""A journal without fencing: only to show what fencing is for (`journal.fencing: false`, `scripts/chaos`)."""

from __future__ import annotations

from serve_app.journal.attempt import Attempt
from serve_app.journal.connection import RespConnection
from serve_app.journal.entries import MAX_ID_PART, entry_from_redis


async def intrude(connection: RespConnection, attempt: Attempt) -> bool:
    """Number a refused attempt's entries behind whoever holds the journal; False once the request has ended."""
    (raw,) = await connection.call([("XREVRANGE", attempt.key, "+", "-", "COUNT", "1")])
    if not raw or isinstance(raw, Exception):
        return False
    last = entry_from_redis(raw[0]).id
    if last.seq == MAX_ID_PART:
        return False
    attempt.move_behind(last)
    return True
