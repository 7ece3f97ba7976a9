"""A journal without fencing (`journal.fencing: false`), to demonstrate with `scripts/chaos` what
fencing prevents.
"""

from __future__ import annotations

from serve_app.journal.attempt import Attempt
from serve_app.journal.entries import entry_from_redis
from serve_app.journal.ids import MAX_ID_PART
from serve_app.redis.connection import RespConnection


async def intrude(connection: RespConnection, attempt: Attempt, within_s: float) -> bool:
    """Number a rejected attempt's entries after those of the journal's owner; False once the
    request has ended.
    """
    last_one = ("XREVRANGE", attempt.key, "+", "-", "COUNT", "1")
    (raw,) = await connection.ask([last_one], within_s)
    if not raw or isinstance(raw, Exception):
        return False
    last = entry_from_redis(raw[0]).id
    if last.seq == MAX_ID_PART:
        return False
    attempt.move_behind(last)
    return True
