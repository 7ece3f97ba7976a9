"""Requests that were given up: kept whole, for somebody to look at and to send again.

Stream `{ns}:dead`, bounded in length. Fields: i request id, w reason, a attempts, and r, m, b as in the journal's
entry 0-1 (request line, facts, body). What could not even be read has u instead, which says where it stood, and its own
fields behind a dot (`.r`, `.d`, …).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from serve_app.errors import JournalUnavailable
from serve_app.journal.connection import RedisLink
from serve_app.journal.entries import Entry, EntryId, RequestFacts, RequestLine, decode_facts, decode_line

_PAGE = 10  # letters a reply: a body may have many megabytes


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A request that was given up. `entry_id` says when, by Redis's clock."""

    entry_id: str
    request_id: str
    reason: str
    attempts: int
    line: RequestLine
    facts: RequestFacts
    body: bytes


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Something in the queue, or a letter, that nobody could read. `source`: where it stood."""

    entry_id: str
    source: str
    fields: Mapping[bytes, bytes]


class DeadLetters:
    """The stream of them, oldest first."""

    def __init__(self, link: RedisLink, namespace: str, keep: int) -> None:
        self._link = link
        self._key = f"{namespace}:dead"
        self._keep = keep

    async def add(self, request_id: str, reason: str, entries: Sequence[Entry]) -> None:
        """Keep a request; the oldest ones go when there are too many.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        if not self._keep:
            return
        attempts = max(entry.id.epoch for entry in entries)
        kept = [part for name in (b"r", b"m", b"b") for part in (name, entries[0].fields.get(name, b""))]
        # Exactly: of small letters, `~` would let a hundred more stand.
        await self._call("XADD", self._key, "MAXLEN", self._keep, "*", "i", request_id, "w", reason,
                         "a", attempts, *kept)  # fmt: skip

    async def add_unreadable(self, source: str, fields: Mapping[bytes, bytes]) -> None:
        """Keep what cannot be decoded, as it is.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        if self._keep:
            raw = [part for name, value in fields.items() for part in (b"." + name, value)]
            await self._call("XADD", self._key, "MAXLEN", self._keep, "*", "u", source, *raw)

    async def read(self) -> list[DeadLetter]:
        """All that can be read, each request once: the last time counts.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        letters: dict[str, DeadLetter] = {}
        async for item in self._items():
            letter = _letter(item)
            if isinstance(letter, Unreadable):
                continue
            letters.pop(letter.request_id, None)
            letters[letter.request_id] = letter
        return list(letters.values())

    async def unreadable(self) -> list[Unreadable]:
        """The others.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        letters = [_letter(item) async for item in self._items()]
        return [letter for letter in letters if isinstance(letter, Unreadable)]

    async def remove(self, request_id: str) -> None:
        """Forget a request.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        ids = [entry_id async for entry_id, flat in self._items() if _fields(flat).get(b"i") == request_id.encode()]
        if ids:
            await self._call("XDEL", self._key, *ids)

    async def _items(self) -> AsyncIterator[Any]:
        start = "-"
        while True:
            page = await self._call("XRANGE", self._key, start, "+", "COUNT", _PAGE)
            for item in page:
                yield item
            if len(page) < _PAGE:
                return
            start = f"({page[-1][0].decode()}"

    async def _call(self, *command: Any) -> Any:
        (reply,) = await self._link.call([command])
        if isinstance(reply, Exception):
            raise JournalUnavailable(f"Redis: {reply}")
        return reply


def _letter(item: Any) -> DeadLetter | Unreadable:
    entry_id, flat = item
    fields = _fields(flat)
    if b"u" in fields:
        raw = {name.removeprefix(b"."): value for name, value in fields.items() if name.startswith(b".")}
        return Unreadable(entry_id.decode(), fields[b"u"].decode(errors="replace"), raw)
    try:
        return _request_letter(entry_id, fields)
    except (msgspec.DecodeError, LookupError, ValueError):
        return Unreadable(entry_id.decode(), "a dead letter", fields)


def _request_letter(entry_id: bytes, fields: dict[bytes, bytes]) -> DeadLetter:
    entry = Entry(EntryId(0, 1), fields)
    return DeadLetter(
        entry_id=entry_id.decode(),
        request_id=fields[b"i"].decode(),
        reason=fields[b"w"].decode(),
        attempts=int(fields[b"a"]),
        line=decode_line(entry),
        facts=decode_facts(entry, RequestFacts),
        body=fields[b"b"],
    )


def _fields(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
