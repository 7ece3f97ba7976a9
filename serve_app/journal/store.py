"""What is done to journals off a worker's hot path: admit, read, end. One pipelined connection for all of it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from serve_app.errors import JournalUnavailable, Reason
from serve_app.journal import outline
from serve_app.journal.bodies import body_key, with_body
from serve_app.journal.connection import Command, RedisLink, Reply
from serve_app.journal.entries import (
    BEGINNING,
    REQUEST_ID,
    TERMINAL_ID,
    Entry,
    EntryId,
    RequestFacts,
    RequestLine,
    encode_wakes,
    entry_from_redis,
    following,
    has_ended,
    journal_key,
    seal_id,
    wake_of,
)
from serve_app.redis_clock import RedisClock
from serve_app.settings import Settings

_ENDED_WITHIN_S = 300.0


class JournalStore:
    """Journals, by request id."""

    def __init__(self, settings: Settings, link: RedisLink, clock: RedisClock | None = None) -> None:
        self._settings = settings
        self._link = link
        self._clock = clock or RedisClock()

    def key(self, request_id: str) -> str:
        """Redis key of a journal."""
        return journal_key(self._settings.namespace, request_id)

    def body_key(self, request_id: str) -> str:
        """Redis key of a request's body."""
        return body_key(self._settings.namespace, request_id)

    async def admit(
        self,
        request_id: str,
        line: RequestLine,
        body: bytes,
        facts: RequestFacts,
        enqueue: tuple[str, Mapping[str, Any]],
    ) -> None:
        """Write the first entry and the body with their expiry, then the queue entry: one round trip. Then it is
        accepted.

        Raises:
            JournalUnavailable: nothing was accepted; `AnswerLost`: that is not known.
        """
        check_admitted(await self._link.call(self.admission(request_id, line, body, facts, enqueue)))

    def keep_ms(self, facts: RequestFacts) -> int:
        """How long a journal is kept that nobody ends: an ending must find it, whenever that is written."""
        retention_s = max(self._settings.journal.retention_s, _ENDED_WITHIN_S)
        return facts.deadline_ms - facts.admitted_ms + int(retention_s * 1000)

    def admission(
        self, request_id: str, line: RequestLine, body: bytes, facts: RequestFacts,
        enqueue: tuple[str, Mapping[str, Any]],
    ) -> list[Command]:  # fmt: skip
        """The transaction that accepts a request; see `check_admitted`."""
        key = self.key(request_id)
        keep_ms = self.keep_ms(facts)
        first = ["r", msgspec.json.encode(line), "m", msgspec.json.encode(facts)]
        stream, fields = enqueue
        return [
            ("MULTI",),
            ("XADD", key, str(REQUEST_ID), *first),
            ("PEXPIRE", key, keep_ms),
            ("SET", self.body_key(request_id), body, "PX", keep_ms),
            ("XADD", stream, "*", *(part for pair in fields.items() for part in pair)),
            ("EXEC",),
        ]

    async def read(self, request_id: str, after: EntryId = BEGINNING) -> list[Entry] | None:
        """Entries behind `after`; None if there is no such journal (any more).

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        (entries,) = await self.read_many([(request_id, after)])
        return entries

    async def read_many(self, wanted: Sequence[tuple[str, EntryId]], at_most: int = 0) -> list[list[Entry] | None]:
        """`read` for many journals in one round trip, of each the first `at_most` entries (0: all).

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        commands: list[Command] = []
        page = ("COUNT", at_most) if at_most else ()
        for request_id, after in wanted:
            key = self.key(request_id)
            commands += [("XRANGE", key, following(after), "+", *page), ("EXISTS", key)]
        replies = iter(await self._link.call(commands))
        journals: list[list[Entry] | None] = []
        for raw, exists in zip(replies, replies, strict=True):
            entries = [entry_from_redis(item) for item in _answered(raw)]
            journals.append(entries if entries or _answered(exists) else None)
        return journals

    async def outline(self, request_id: str) -> list[Entry] | None:
        """The entries that decide a request's state, without any bytes: see `outline`. None if there is no journal.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        key = self.key(request_id)
        replies = [_answered(reply) for reply in await self._link.call(outline.first_questions(key))]
        found = outline.put_together(replies)
        if epochs := outline.epochs_left(found):
            replies += [_answered(reply) for reply in await self._link.call(outline.more_questions(key, epochs))]
            found = outline.put_together(replies)
        return found or None

    async def read_request(self, request_id: str) -> Entry | None:
        """The request itself, with its body where that is still there; None if there is no such journal (any more).

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        first = str(REQUEST_ID)
        raw, body = await self._link.call(
            [("XRANGE", self.key(request_id), first, first), ("GET", self.body_key(request_id))]
        )
        found = with_body([entry_from_redis(item) for item in _answered(raw)], _answered(body))
        return found[0] if found else None

    async def read_tails(self, request_ids: Sequence[str]) -> list[list[Entry] | None]:
        """Of many journals the opening of the last attempt, if there is one, and the last entry; None of one that is
        not there. A seal that has ended an attempt below a newer opening comes along. Two round trips.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        replies = await self._link.call(
            [("XREVRANGE", self.key(request_id), "+", "-", "COUNT", "1") for request_id in request_ids]
        )
        tails = {request_id: _of_one(raw) for request_id, raw in zip(request_ids, replies, strict=True)}
        more = [(name, str(at)) for name, tail in tails.items() if tail for at in _before(tail[0])]
        if more:
            replies = await self._link.call([("XRANGE", self.key(name), at, at) for name, at in more])
            for (name, _), raw in zip(more, replies, strict=True):
                tails[name] = [*tails[name][:-1], *_of_one(raw), tails[name][-1]]
        return [tails[request_id] or None for request_id in request_ids]

    async def last_id(self, request_id: str) -> EntryId | None:
        """Id of the last entry; None if there is no journal.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        (raw,) = await self._link.call([("XREVRANGE", self.key(request_id), "+", "-", "COUNT", "1")])
        found = _answered(raw)
        return entry_from_redis(found[0]).id if found else None

    async def disown(self, request_id: str, epoch: int, nonce: bytes) -> bool:
        """Of an opening whose answer was lost: where Redis has it, say that nobody works on it.

        Or whoever adopts the request would wait for an attempt that its worker knows nothing of.

        Returns:
            Whether the opening was found; Redis may still have it before it, in what a lost connection had sent.

        Raises:
            JournalUnavailable: Redis cannot be reached.
        """
        key, opening = self.key(request_id), f"{epoch}-0"
        (raw,) = await self._link.call([("XRANGE", key, opening, opening)])
        found = [entry_from_redis(item) for item in _answered(raw)]
        if not found or found[0].nonce != nonce:
            return False
        # Refused where a newer epoch has begun: then nobody waits for this one.
        await self._link.call([("XADD", key, "NOMKSTREAM", f"{epoch}-1", "n", nonce, "q", "not_opened")])
        return True

    async def end(self, request_id: str, state: str, reason: Reason, entries: list[Entry]) -> bool:
        """Append the terminal entry from outside of an attempt: cancelled, expired, lost.

        The body goes first: where Redis is full, that may be what makes room for the entry.

        Args:
            entries: the journal as read before (its outline will do), for the summary and the wake-up.

        Returns:
            Whether this call ended it; False if it had ended already or is gone.

        Raises:
            JournalUnavailable: Redis cannot be reached, or it is not known whether the entry was written.
        """
        if has_ended(entries):  # what a compacted journal holds is no beginning of a summary either
            return False
        summary = outline.summary_of(entries, self._clock.now_ms())
        fields: dict[bytes, bytes] = {
            b"n": secrets.token_bytes(8),
            b"k": state.encode(),
            b"w": str(reason).encode(),
            b"m": msgspec.json.encode(summary),
        }
        key = self.key(request_id)
        # Without `p` no follower takes it for the successor of what it knows: a worker may append until now.
        flat = [part for pair in fields.items() for part in pair]
        since = following(entries[-1].id if entries else BEGINNING)
        _, reply, raw = await self._link.call(
            [
                ("UNLINK", self.body_key(request_id)),
                ("XADD", key, "NOMKSTREAM", str(TERMINAL_ID), *flat),
                ("XRANGE", key, since, "+"),
            ]
        )
        if reply is None or (isinstance(reply, Exception) and _refused(reply)):
            return False
        _answered(reply)
        if has_ended([entry_from_redis(item) for item in _answered(raw)[:-1]]):
            return False  # a worker's seal came first, and the first ending counts
        after: list[Command] = [("PEXPIRE", key, int(self._settings.journal.retention_s * 1000))]
        if summary.request is not None:
            wakes = encode_wakes([wake_of(request_id, Entry(TERMINAL_ID, fields))])
            after.append(("PUBLISH", summary.request.wake, wakes))
        await self._link.call(after)
        return True


def check_admitted(replies: list[Reply]) -> None:
    """Of a transaction that accepts a request.

    Raises:
        JournalUnavailable: Redis has refused a part of it.
    """
    for reply in [*replies, *(replies[-1] if isinstance(replies[-1], list) else [])]:
        if isinstance(reply, Exception):
            raise JournalUnavailable(f"Redis: {reply}")


def _answered(reply: Reply) -> Any:
    if isinstance(reply, Exception):
        raise JournalUnavailable(f"Redis: {reply}")
    return reply


def _refused(error: Exception) -> bool:
    """The id is not free: the request has ended already."""
    return "exhausted" in str(error) or "equal or smaller" in str(error)


def _before(last: Entry) -> Iterator[EntryId]:
    """What else decides about a journal with this last entry: the attempt's opening, or the seals below that."""
    if last.ends or last.id.epoch == 0:
        return
    if last.id.seq > 0:
        yield EntryId(last.id.epoch, 0)
    else:
        yield from map(seal_id, range(1, last.id.epoch))


def _of_one(raw: Reply) -> list[Entry]:
    """Of many journals asked for at once: a key that is none of ours must not hide the others."""
    if isinstance(raw, Exception) and str(raw).startswith("WRONGTYPE"):
        return []
    return [entry_from_redis(item) for item in _answered(raw)]
