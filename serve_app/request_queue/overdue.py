"""Finds requests that wait in a queue although their deadline has passed: nobody claims them if no
engine has capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from redis.asyncio import Redis

from serve_app import timings
from serve_app.journal.ids import BEGINNING, EntryId
from serve_app.redis.client import redis_call
from serve_app.redis.keyspace import QUEUE_GROUP
from serve_app.request_queue.entry import decode_deadline


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
        self, redis: Redis, streams: Iterable[str], may_wait: Callable[[], bool] = lambda: True
    ) -> None:
        self._redis = redis
        self._may_wait = may_wait
        self._looked_to = dict.fromkeys(streams, BEGINNING)

    async def overdue(self, now_ms: int) -> list[Overdue]:
        """The requests in the next part of every queue whose deadline is before `now_ms`.

        Each call continues where the previous one stopped, so a long queue costs no more than a
        short one.
        """
        if not self._may_wait():
            return []
        groups = self._redis.pipeline(transaction=False)
        for stream in self._looked_to:
            groups.xinfo_groups(stream)
        claimed = await redis_call(lambda: groups.execute(raise_on_error=False))
        lines = self._redis.pipeline(transaction=False)
        for (stream, looked_to), found in zip(self._looked_to.items(), claimed, strict=True):
            ms, seq = max(looked_to, _last_claimed(found))
            lines.xrange(stream, min=f"{ms}-{seq + 1}", count=timings.OVERDUE_A_LOOK)
        late: list[Overdue] = []
        for stream, items in zip(
            list(self._looked_to), await redis_call(lambda: lines.execute()), strict=True
        ):
            self._looked_to[stream] = (
                EntryId.parse(items[-1][0]) if len(items) == timings.OVERDUE_A_LOOK else BEGINNING
            )
            late += _late(stream, items, now_ms)
        return late

    async def remove(self, entry: Overdue) -> None:
        """Delete an entry whose request has ended, whoever has claimed it meanwhile."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.xdel(entry.stream, entry.entry_id)
        pipeline.xack(entry.stream, QUEUE_GROUP, entry.entry_id)
        await redis_call(lambda: pipeline.execute(raise_on_error=False))


def _last_claimed(groups: Any) -> EntryId:
    """The last claimed id of a queue's group; none if the queue does not exist yet."""
    if isinstance(groups, Exception):
        return BEGINNING
    return max((EntryId.parse(group["last-delivered-id"]) for group in groups), default=BEGINNING)


def _late(stream: str, items: Any, now_ms: int) -> Iterator[Overdue]:
    for entry_id, fields in items:
        # The ingress that claims an entry handles it if it cannot be decoded.
        found = decode_deadline(fields)
        if found is not None and found[1] <= now_ms:
            yield Overdue(stream, entry_id.decode(), found[0])
