"""Dead letters: requests that were given up, kept completely so that somebody can examine them and
send them again; and queue entries that could not be decoded.

Key: the stream `{ns}:dead`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

from serve_app import timings
from serve_app.contract import Reason
from serve_app.journal.entries import (
    REQUEST_ID,
    Entry,
    RequestFacts,
    RequestLine,
    decode_facts,
    decode_line,
)
from serve_app.redis.keyspace import dead_letters_key
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import answered, with_fields


class DeadLetter(NamedTuple):
    """A request that was given up. `entry_id` contains the time, by Redis's clock."""

    entry_id: str
    request_id: str
    reason: str
    attempts: int
    line: RequestLine
    facts: RequestFacts
    body: bytes


class UnreadableLetter(NamedTuple):
    """A queue entry or dead letter that could not be decoded. `source`: where it was found."""

    entry_id: str
    source: str
    fields: Mapping[bytes, bytes]


class DeadLetters:
    """The stream of dead letters, oldest first, of a bounded length. What asks Redis raises
    `RedisUnavailable` if it cannot be reached. The fields:

        i  request id
        w  reason
        a  attempts
        r  request line, as in the journal's entry 0-1
        m  facts, as there
        b  body

    An entry that could not be decoded has others:

        u  where it was found
        .  before each of its own (`.r`, `.d`, …)
    """

    def __init__(self, link: RedisLink, namespace: str, keep: int) -> None:
        self._link = link
        self._key = dead_letters_key(namespace)
        self._keep = keep

    async def add(self, request_id: str, reason: Reason, request: Entry, attempts: int) -> None:
        """Keep a request; if there are too many, the oldest ones are deleted."""
        of_request = {name: request.fields.get(name, b"") for name in (b"r", b"m", b"b")}
        await self._add({b"i": request_id, b"w": reason, b"a": attempts, **of_request})

    async def add_unreadable(self, source: str, fields: Mapping[bytes, bytes]) -> None:
        """Keep an entry that cannot be decoded, unchanged."""
        await self._add({b"u": source, **{b"." + name: value for name, value in fields.items()}})

    async def _add(self, fields: Mapping[bytes, Any]) -> None:
        if self._keep:  # exact trimming: with small letters, `~` would keep a hundred more
            flat = [part for pair in fields.items() for part in pair]
            await self._call("XADD", self._key, "MAXLEN", self._keep, "*", *flat)

    async def each(self, request_id: str = "") -> AsyncIterator[DeadLetter | UnreadableLetter]:
        """The dead letters, oldest first; or those of one request. A few bodies are in memory at a
        time.
        """
        async for item in self._items():
            if not request_id or with_fields(item)[1].get(b"i") == request_id.encode():
                yield _letter(item)

    async def remove(self, request_id: str) -> None:
        """Delete a request's dead letters."""
        ids = [letter.entry_id async for letter in self.each(request_id)]
        if ids:
            await self._call("XDEL", self._key, *ids)

    async def _items(self) -> AsyncIterator[Any]:
        start = "-"
        while True:
            most = timings.DEAD_LETTERS_A_PAGE
            page = await self._call("XRANGE", self._key, start, "+", "COUNT", most)
            for item in page:
                yield item
            if len(page) < most:
                return
            start = f"({page[-1][0].decode()}"

    async def _call(self, *command: Any) -> Any:
        (reply,) = await self._link.call([command], large=True)  # letters hold bodies
        return answered(reply)


def _letter(item: Any) -> DeadLetter | UnreadableLetter:
    entry_id, fields = with_fields(item)
    if b"u" in fields:
        raw = {name[1:]: value for name, value in fields.items() if name.startswith(b".")}
        return UnreadableLetter(entry_id.decode(), fields[b"u"].decode(errors="replace"), raw)
    entry = Entry(REQUEST_ID, fields)
    try:
        return DeadLetter(
            entry_id=entry_id.decode(),
            request_id=fields[b"i"].decode(),
            reason=fields[b"w"].decode(),
            attempts=int(fields[b"a"]),
            line=decode_line(entry),
            facts=decode_facts(entry, RequestFacts),
            body=fields[b"b"],
        )
    except (LookupError, ValueError):
        return UnreadableLetter(entry_id.decode(), "a dead letter", fields)
