"""Reads journals, and what belongs to them, outside of a worker's hot path. What reads the entries
of many journals, or all of one, uses the connections for large answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from serve_app import timings
from serve_app.clock import RedisClock
from serve_app.contract import Cause
from serve_app.journal.entries import (
    BEGINNING,
    REQUEST_ID,
    Entry,
    EntryId,
    entry_from_redis,
    following,
    opening_id,
)
from serve_app.redis.connection import Command
from serve_app.redis.keyspace import (
    body_key,
    chats_key,
    journal_key,
    kept_key,
    metadata_key,
    requests_key,
)
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import all_answered, answered
from serve_app.requests.lifecycle import append, reading, retaining
from serve_app.requests.record import Record
from serve_app.settings import Settings


def with_body(entries: Sequence[Entry], body: bytes | None) -> list[Entry]:
    """The journal with the body put back into the request's entry. `None` as the body: its Redis
    key is gone.
    """
    if not entries or entries[0].id != REQUEST_ID or body is None:
        return list(entries)
    whole = {**entries[0].fields, b"b": body}
    return [entries[0]._replace(fields=whole), *entries[1:]]


def long_questions(key: str, body_key: str) -> list[Command]:
    """The commands that read all of a journal, and the request's body."""
    return [("XRANGE", key, "-", "+"), ("GET", body_key)]


class Kept(NamedTuple):
    """Bytes of answers that are kept because nobody waited for them."""

    of_tenant: int
    in_all: int


class JournalStore:
    """Journals, by request id. What asks Redis raises `RedisUnavailable` if it cannot be
    reached.
    """

    def __init__(
        self, settings: Settings, link: RedisLink, clock: RedisClock | None = None
    ) -> None:
        self._settings = settings
        self._link = link
        self.clock = clock or RedisClock()
        self.wholes = asyncio.Semaphore(timings.WHOLES_AT_ONCE)
        """Held by whoever reads a whole journal into memory, and until it has made of it what it
        needs: an answer may have `journal.max_answer_bytes`."""

    def key(self, request_id: str) -> str:
        return journal_key(self._settings.namespace, request_id)

    def body_key(self, request_id: str) -> str:
        return body_key(self._settings.namespace, request_id)

    async def record(self, request_id: str) -> Record | None:
        """What is known of a request; None if there is no journal (any more)."""
        (found,) = await self.records([request_id])
        return found

    async def records(self, request_ids: Sequence[str]) -> list[Record | None]:
        """The same of many requests, in one round trip."""
        questions = [reading(self.key(request_id)) for request_id in request_ids]
        return [*map(Record.from_redis, await self._link.call(questions))]

    async def read(self, request_id: str) -> list[Entry] | None:
        """All entries; None if there is no such journal (any more)."""
        (entries,) = await self.read_many([(request_id, BEGINNING)])
        return entries

    async def read_many(
        self, wanted: Sequence[tuple[str, EntryId]], at_most: int = 0
    ) -> list[list[Entry] | None]:
        """Like `read` for many journals in one round trip; of each the first `at_most` entries
        after an id (0: all).
        """
        commands: list[Command] = []
        page = ("COUNT", at_most) if at_most else ()
        for request_id, after in wanted:
            key = self.key(request_id)
            commands += [("XRANGE", key, following(after), "+", *page), ("EXISTS", key)]
        replies = iter(await self._link.call(commands, large=True))
        journals: list[list[Entry] | None] = []
        for raw, exists in zip(replies, replies, strict=True):
            entries = [entry_from_redis(item) for item in answered(raw)]
            journals.append(entries if entries or answered(exists) else None)
        return journals

    async def whole(self, request_id: str) -> tuple[list[Entry], bytes | None]:
        """All of a journal, and the request's body, None if that is not kept (any more). Hold
        `wholes` meanwhile.
        """
        questions = long_questions(self.key(request_id), self.body_key(request_id))
        raw, body = all_answered(await self._link.call(questions, large=True))
        return [entry_from_redis(item) for item in raw], body

    async def read_request(self, request_id: str) -> Entry | None:
        """The request itself, with its body if that still exists; None if there is no such journal
        (any more).
        """
        first = ("XRANGE", self.key(request_id), str(REQUEST_ID), str(REQUEST_ID))
        questions = [first, ("GET", self.body_key(request_id))]
        raw, body = await self._link.call(questions, large=True)
        found = with_body([entry_from_redis(item) for item in answered(raw)], answered(body))
        return found[0] if found else None

    async def listed(
        self,
        tenant: str,
        after: str,
        at_most: int,
        chats: bool = False,
        newest_first: bool = True,
    ) -> list[str] | None:
        """The ids of a tenant's latest requests, or stored chat completions, those that are gone
        included; None if `after` is not listed (any more).

        Args:
            after: the id behind which the page begins; empty for the first page.
        """
        key = (chats_key if chats else requests_key)(self._settings.namespace, tenant)
        order, first = "ZREV" if newest_first else "Z", 0
        if after:
            (rank,) = all_answered(await self._link.call([(f"{order}RANK", key, after)]))
            if rank is None:
                return None
            first = rank + 1
        page = (f"{order}RANGE", key, first, first + at_most - 1)
        (ids,) = all_answered(await self._link.call([page]))
        return [request_id.decode() for request_id in ids]

    async def asked(self, request_id: str) -> tuple[bytes | None, bytes | None]:
        """The body of a request, and metadata that were set later; None for what is not there."""
        keys = self.body_key(request_id), metadata_key(self._settings.namespace, request_id)
        (found,) = all_answered(await self._link.call([("MGET", *keys)], large=True))
        return found[0], found[1]

    async def set_metadata(self, request_id: str, metadata: bytes) -> None:
        """Keep metadata as long as the journal; without one, do nothing."""
        (left_ms,) = all_answered(await self._link.call([("PTTL", self.key(request_id))]))
        if left_ms > 0:
            key = metadata_key(self._settings.namespace, request_id)
            all_answered(await self._link.call([("SET", key, metadata, "PX", left_ms)]))

    async def forget(self, request_id: str) -> None:
        """Delete the journal of a request that has ended."""
        record = await self.record(request_id)
        key, body = self.key(request_id), self.body_key(request_id)
        metadata = metadata_key(self._settings.namespace, request_id)
        replies = await self._link.call([("UNLINK", key), ("UNLINK", body, metadata)])
        deleted, _ = all_answered(replies)
        if deleted and record is not None and record.summary:  # whoever wrote it has counted it
            uncounting = retaining(self._settings, record.summary, record.size, -1)
            await self._link.call(uncounting)

    async def kept(self, tenant: str) -> Kept:
        """What is kept now; forgets the hours that have passed.

        Args:
            tenant: whose share to tell; empty if only the total is wanted.
        """
        keys = {one: kept_key(self._settings.namespace, one) for one in (tenant, "")}
        questions = [("HGETALL", key) for key in keys.values()]
        pages = all_answered(await self._link.call(questions))
        now_hour, sums, passed = self.clock.now_ms() / timings.HOUR_MS, [], list[Command]()
        for key, page in zip(keys.values(), pages, strict=True):
            sizes = dict(zip(map(int, page[::2]), map(int, page[1::2]), strict=True))
            over = [hour for hour in sizes if hour <= now_hour]
            sums.append(sum(size for hour, size in sizes.items() if hour > now_hour))
            if over:
                passed.append(("HDEL", key, *over))
        if passed:
            await self._link.call(passed)
        return Kept(sums[0], sums[-1])

    async def void(self, request_id: str, epoch: int, nonce: bytes) -> bool:
        """Void an opening whose answer was lost: if Redis has it, append that nobody works on it.

        Otherwise an ingress that adopts the request would wait for an attempt that its worker does
        not know of.

        Returns:
            Whether the opening was found. If not, Redis may still receive it from the lost
            connection.
        """
        key, opening = self.key(request_id), opening_id(epoch)
        (raw,) = await self._link.call([("XRANGE", key, str(opening), str(opening))])
        found = [entry_from_redis(item) for item in answered(raw)]
        if not found or found[0].nonce != nonce:
            return False
        # Redis rejects this if a newer epoch has begun; nobody waits for this attempt then.
        voided = Entry.void(EntryId(epoch, opening.seq + 1), nonce, Cause.NOT_OPENED)
        await self._link.call([append(key, voided)])
        return True
