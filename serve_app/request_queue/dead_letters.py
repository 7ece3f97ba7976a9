"""Requests that were given up: kept whole, for somebody to look at and to send again.

Stream `{ns}:dead`, bounded in length. Fields: i request id, w reason, a attempts, and r, m, b as in the journal's
entry 0-1 (request line, facts, body).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

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

    async def read(self) -> list[DeadLetter]:
        """All of them, each request once: the last time counts.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        letters: dict[str, DeadLetter] = {}
        async for item in self._items():
            letter = _letter(item)
            letters.pop(letter.request_id, None)
            letters[letter.request_id] = letter
        return list(letters.values())

    async def remove(self, request_id: str) -> None:
        """Forget a request.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        ids = [entry_id async for entry_id, flat in self._items() if _fields(flat)[b"i"] == request_id.encode()]
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


def _letter(item: Any) -> DeadLetter:
    entry_id, flat = item
    fields = _fields(flat)
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
