"""The streams of one model's queue: one for each class, each with the same consumer group.

Keys: streams `{ns}:q:<model>:<class>`; consumer group `QUEUE_GROUP`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from serve_app.errors import RedisUnavailable
from serve_app.policy.classes import CLASSES
from serve_app.redis.connection import Command
from serve_app.redis.keyspace import QUEUE_GROUP, queue_key
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import answered
from serve_app.request_queue.dead_letters import DeadLetters
from serve_app.request_queue.entry import QueueEntry, decode_entry

log = logging.getLogger("hermes.dispatcher")


class QueueStreams:
    """Connection, keys and consumer groups, shared by all parts of the queue."""

    def __init__(self, link: RedisLink, namespace: str, model: str, dead: DeadLetters) -> None:
        self.link = link
        self.namespace = namespace
        self.by_class = {name: queue_key(namespace, model, name) for name in CLASSES}
        self._classes = {stream: name for name, stream in self.by_class.items()}
        self.dead = dead
        self._prepared = False

    @property
    def keys(self) -> list[str]:
        """Redis keys of the streams, the most urgent class first."""
        return list(self.by_class.values())

    async def prepare(self) -> None:
        """Create the consumer groups, unless it is known that they exist.

        Raises:
            RedisUnavailable: Redis cannot be reached.
        """
        if self._prepared:
            return
        create = [("XGROUP", "CREATE", key, QUEUE_GROUP, "0", "MKSTREAM") for key in self.keys]
        for reply in await self.link.call(create):
            if not str(reply).startswith("BUSYGROUP"):  # it exists already
                answered(reply)
        self._prepared = True

    def forget(self) -> None:
        """Create the groups again before the next use, because Redis may have come back empty."""
        self._prepared = False

    async def entries(self, stream: str, items: Iterable[Any]) -> list[QueueEntry]:
        """The claimed items that can be decoded. Each other item becomes a dead letter, so that it
        does not hide the rest.
        """
        entries = []
        for entry_id, fields in items:
            try:
                entries.append(decode_entry(stream, self._classes[stream], entry_id, fields))
            except (LookupError, ValueError) as error:
                log.error(
                    "queue: an entry of %s that cannot be read becomes a dead letter: %r",
                    stream,
                    error,
                )
                await self._bury(stream, entry_id, fields)
        return entries

    async def _bury(self, stream: str, entry_id: bytes, fields: Any) -> None:
        try:
            await self.dead.add_unreadable(f"{stream} {text(entry_id)}", fields)
            await self.link.call(deletion(stream, text(entry_id)))
        except RedisUnavailable as error:  # it remains claimed, and will be found again
            log.warning("queue: cannot keep the dead letter yet: %s", error)


def deletion(stream: str, entry_id: str) -> list[Command]:
    """The commands that delete a queue entry and its claim.

    It is deleted first: an entry that then remains pending is repaired by a take-over. In the other
    order it would count forever.
    """
    return [("XDEL", stream, entry_id), ("XACK", stream, QUEUE_GROUP, entry_id)]


def text(value: bytes) -> str:
    """Decode a name or an id."""
    return value.decode()


def with_fields(item: Any) -> tuple[bytes, dict[bytes, bytes]]:
    """The id and the fields of an entry, from `[id, [field, value, ...]]`."""
    entry_id, flat = item
    return entry_id, dict(zip(flat[::2], flat[1::2], strict=True))
