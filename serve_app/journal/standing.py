"""What a journal says about an attempt that this process works on.

The writer checks this when Redis rejects an append, after a reconnect (Redis may have come back
with older data), and while an attempt appends nothing (otherwise it would not notice that its
request was ended).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from serve_app.journal.attempt import Attempt
from serve_app.journal.entries import Entry, entry_from_redis
from serve_app.redis.connection import RespConnection
from serve_app.redis.replies import answered


class Standing(Enum):
    """The state of an attempt according to its journal."""

    OURS = auto()
    """The attempt owns the journal, but entries after the last one may be missing."""
    ENDED = auto()
    """Its own terminal entry was accepted."""
    FENCED = auto()
    """The journal is gone, or somebody else ended the request or works on it."""


def standing(attempt: Attempt, last: Entry | None) -> Standing:
    """The state of an attempt whose journal has this last entry; None: the journal is gone."""
    if last is None:
        return Standing.FENCED
    if last.terminal:
        return Standing.ENDED if last.nonce == attempt.nonce else Standing.FENCED
    newer = last.id > attempt.last_built
    rival = last.id.epoch == attempt.epoch and last.nonce != attempt.nonce
    return Standing.FENCED if newer or rival else Standing.OURS


async def last_entries(
    connection: RespConnection, attempts: Sequence[Attempt], within_s: float
) -> list[Entry | Exception | None]:
    """The last entry of each attempt's journal, in one round trip; None if the journal is gone, an
    exception if Redis answered with an error.

    Raises:
        RedisUnavailable: Redis did not answer within `within_s`.
    """
    commands = [("XREVRANGE", attempt.key, "+", "-", "COUNT", "1") for attempt in attempts]
    return [
        raw if isinstance(raw, Exception) else entry_from_redis(raw[0]) if raw else None
        for raw in await connection.ask(commands, within_s)
    ]


async def was_ours(
    connection: RespConnection, attempt: Attempt, entry: Entry, within_s: float
) -> bool:
    """Redis rejected an append: was it a retry of our own, or are we fenced? The same nonce (and
    kind) means our own.

    Raises:
        RedisUnavailable: Redis did not answer within `within_s`, or answered with an error.
    """
    position = str(entry.id)
    (raw,) = await connection.ask([("XRANGE", attempt.key, position, position)], within_s)
    if not answered(raw, what=f"reading back {position}"):
        return False
    found = entry_from_redis(raw[0])
    return found.nonce == attempt.nonce and found.state == entry.state
