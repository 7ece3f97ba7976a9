"""What waits in the lines although its deadline has passed: nobody claims it where no engine has room."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from redis.asyncio import Redis

from serve_app.journal.client import reaching
from serve_app.journal.entries import EntryId
from serve_app.request_queue.queue import GROUP

_LOOK_AT_MOST = 500
_START = EntryId(0, 0)


class Overdue(NamedTuple):
    """A queue entry that nobody has claimed in time."""

    stream: str
    entry_id: str
    request_id: str


class Waiting:
    """The unclaimed part of some lines, looked through a few hundred entries at a time."""

    def __init__(self, redis: Redis, streams: Iterable[str]) -> None:
        self._redis = redis
        self._looked_to = dict.fromkeys(streams, _START)

    async def overdue(self, now_ms: int) -> list[Overdue]:
        """Of the next part of every line, what should have ended by `now_ms`.

        A call goes on where the one before has stopped: a long line costs no more than a short one.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        groups = self._redis.pipeline(transaction=False)
        for stream in self._looked_to:
            groups.xinfo_groups(stream)
        claimed = await reaching(lambda: groups.execute(raise_on_error=False))
        lines = self._redis.pipeline(transaction=False)
        for (stream, looked_to), found in zip(self._looked_to.items(), claimed, strict=True):
            ms, seq = max(looked_to, _last_claimed(found))
            lines.xrange(stream, min=f"{ms}-{seq + 1}", count=_LOOK_AT_MOST)
        late: list[Overdue] = []
        for stream, items in zip(list(self._looked_to), await reaching(lambda: lines.execute()), strict=True):
            self._looked_to[stream] = EntryId.parse(items[-1][0]) if len(items) == _LOOK_AT_MOST else _START
            late += _late(stream, items, now_ms)
        return late

    async def remove(self, entry: Overdue) -> None:
        """Its request has ended: the line forgets it, whoever has claimed it meanwhile.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.xdel(entry.stream, entry.entry_id)
        pipeline.xack(entry.stream, GROUP, entry.entry_id)
        await reaching(lambda: pipeline.execute(raise_on_error=False))


def _last_claimed(groups: Any) -> EntryId:
    """Of a line's groups. A line that does not exist yet has none."""
    if isinstance(groups, Exception):
        return _START
    return max((EntryId.parse(group["last-delivered-id"]) for group in groups), default=_START)


def _late(stream: str, items: Any, now_ms: int) -> Iterator[Overdue]:
    for entry_id, fields in items:
        deadline_ms, request_id = fields.get(b"d", b""), fields.get(b"r", b"")
        # What cannot be decoded is left to whoever claims it.
        if deadline_ms.isdigit() and request_id and int(deadline_ms[:20]) <= now_ms:
            yield Overdue(stream, entry_id.decode(), request_id.decode(errors="replace"))
