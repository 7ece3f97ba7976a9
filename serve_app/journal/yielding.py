"""Ends a running attempt from outside, so that another request gets its place in the engine.

The entry that is appended fences the attempt's next output: its worker then stops, and tells what
was written. Nothing is lost, because another attempt continues from the journal.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import msgspec

from serve_app.contract import Cause
from serve_app.journal.entries import Entry, entry_from_redis, flatten, has_ended
from serve_app.journal.ids import opening_id, seal_id, yield_id
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import all_answered, answered, is_id_taken

_FIRST = 3
"""Of an attempt: its opening, events before the first output, the first output."""


class Yielding(Enum):
    """What came of it."""

    DONE = auto()
    NOT_NOW = auto()
    """The attempt has written nothing yet, or is over."""
    NEVER = auto()
    """No other attempt could continue it exactly."""


async def end_attempt(link: RedisLink, key: str, epoch: int) -> Yielding:
    """End an attempt that can be continued.

    Raises:
        RedisUnavailable: Redis cannot be reached, or it is unknown whether the attempt has ended.
    """
    begin, end = str(opening_id(epoch)), str(seal_id(epoch))
    replies = await link.call(
        [
            ("XRANGE", key, begin, end, "COUNT", str(_FIRST)),
            ("XREVRANGE", key, "+", "-", "COUNT", "1"),
        ]
    )
    first, last = ([entry_from_redis(item) for item in raw] for raw in all_answered(replies))
    possible = _possible(first, last, epoch)
    if possible is not Yielding.DONE:
        return possible
    entry = yield_of(epoch, secrets.token_bytes(8))
    (reply,) = await link.call([("XADD", key, "NOMKSTREAM", str(entry.id), *flatten(entry))])
    if reply is None or is_id_taken(reply):
        return Yielding.NOT_NOW  # it has ended, or a newer attempt has begun
    answered(reply)
    return Yielding.DONE


def yield_of(epoch: int, nonce: bytes) -> Entry:
    """The entry that takes an attempt's place away."""
    return Entry.void(yield_id(epoch), nonce, Cause.YIELDED)


def _possible(first: Sequence[Entry], last: Sequence[Entry], epoch: int) -> Yielding:
    """Whether an attempt can yield, by its first entries and the journal's last one."""
    output = next((entry for entry in first if entry.outputs is not None), None)
    if output is None or last[0].id.epoch != epoch or has_ended(last) or last[0].quit:
        return Yielding.NOT_NOW
    latest = _outputs(last[0])
    if any(finish_reason for _, _, _, finish_reason, *_ in latest):
        return Yielding.NOT_NOW  # this generation is over; perhaps another one follows
    # Several generations cannot be continued.
    alone = all(index == 0 for index, *_ in (*_outputs(output), *latest))
    return Yielding.DONE if output.continuable and alone else Yielding.NEVER


def _outputs(entry: Entry) -> list[list[Any]]:
    """What the engine has produced with an entry, as `Attempt.append` has it."""
    outputs: list[list[Any]] = msgspec.json.decode(entry.outputs or b"[]")
    return outputs
