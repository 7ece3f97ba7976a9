"""Finds requests that wait in a queue although their deadline has passed: nobody claims them if no
engine has capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from serve_app import timings
from serve_app.journal.ids import BEGINNING, EntryId
from serve_app.redis.connection import Command
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import all_answered
from serve_app.request_queue.entry import decode_deadline
from serve_app.request_queue.streams import deletion, with_fields


class Overdue(NamedTuple):
    """A queue entry that nobody has claimed in time."""

    stream: str
    entry_id: str
    request_id: str


class Waiting:
    """The unclaimed part of some queues, read a few hundred entries at a time. What asks Redis
    raises `RedisUnavailable` if it cannot be reached.

    Args:
        may_wait: whether there is anything to read.
    """

    def __init__(
        self, link: RedisLink, streams: Iterable[str], may_wait: Callable[[], bool] = lambda: True
    ) -> None:
        self._link = link
        self._may_wait = may_wait
        self._looked_to = dict.fromkeys(streams, BEGINNING)

    async def overdue(self, now_ms: int) -> list[Overdue]:
        """The requests in the next part of every queue whose deadline is before `now_ms`.

        Each call continues where the previous one stopped, so a long queue costs no more than a
        short one.
        """
        if not self._may_wait():
            return []
        streams = list(self._looked_to)
        claimed = await self._link.call([("XINFO", "GROUPS", stream) for stream in streams])
        parts: list[Command] = []
        for stream, found in zip(streams, claimed, strict=True):
            ms, seq = max(self._looked_to[stream], _last_claimed(found))
            parts.append(
                ("XRANGE", stream, f"{ms}-{seq + 1}", "+", "COUNT", timings.OVERDUE_A_LOOK)
            )
        late: list[Overdue] = []
        looked = all_answered(await self._link.call(parts))
        for stream, items in zip(streams, looked, strict=True):
            self._looked_to[stream] = (
                EntryId.parse(items[-1][0]) if len(items) == timings.OVERDUE_A_LOOK else BEGINNING
            )
            late += _late(stream, items, now_ms)
        return late

    async def remove(self, entry: Overdue) -> None:
        """Delete an entry whose request has ended, whoever has claimed it meanwhile."""
        await self._link.call(deletion(entry.stream, entry.entry_id))


def _last_claimed(groups: Any) -> EntryId:
    """The last claimed id of a queue's group; none if the queue does not exist yet."""
    if isinstance(groups, Exception):
        return BEGINNING
    facts = (dict(zip(group[::2], group[1::2], strict=True)) for group in groups)
    return max((EntryId.parse(one[b"last-delivered-id"]) for one in facts), default=BEGINNING)


def _late(stream: str, items: Any, now_ms: int) -> Iterator[Overdue]:
    for entry_id, fields in map(with_fields, items):
        # The ingress that claims an entry handles it if it cannot be decoded.
        found = decode_deadline(fields)
        if found is not None and found[1] <= now_ms:
            yield Overdue(stream, entry_id.decode(), found[0])
