"""Operations on journals outside of a worker's hot path: first entries, reads, endings. What
reads the entries of many journals, or all of one, uses the connections for large answers.

The outline of a journal is for callers that need neither the request's body nor its output: the few
entries that determine the request's state. They are the request itself, every opening, every seal,
and the last two entries. A journal has one opening per attempt, so reading them takes a few small
ranges, however long the response is.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from serve_app import timings
from serve_app.clock import RedisClock
from serve_app.contract import Cause, CompletionStats, Reason, State
from serve_app.errors import Unreadable
from serve_app.journal.entries import (
    Entry,
    decode_facts,
    entry_from_redis,
    has_ended,
    openings,
)
from serve_app.journal.facts import AttemptFacts, RequestFacts, Summary
from serve_app.journal.ids import (
    BEGINNING,
    REQUEST_ID,
    EntryId,
    following,
    opening_id,
    seal_id,
)
from serve_app.journal.usage import Usage, Whose
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
from serve_app.redis.replies import (
    Reply,
    all_answered,
    answered,
    is_id_taken,
    is_of_another_type,
)
from serve_app.requests.lifecycle import append, end
from serve_app.requests.signals import Ended, retaining
from serve_app.settings import Settings


async def listed(
    link: RedisLink, key: str, after: str, at_most: int, newest_first: bool = True
) -> list[str] | None:
    """The ids in a list, those that are gone included.

    Args:
        after: the id behind which the page begins; empty for the newest.

    Returns:
        None if `after` is not listed (any more).

    Raises:
        RedisUnavailable: Redis cannot be reached.
    """
    order, first = "ZREV" if newest_first else "Z", 0
    if after:
        (rank,) = all_answered(await link.call([(f"{order}RANK", key, after)]))
        if rank is None:
            return None
        first = rank + 1
    (ids,) = all_answered(await link.call([(f"{order}RANGE", key, first, first + at_most - 1)]))
    return [request_id.decode() for request_id in ids]


def with_body(entries: Sequence[Entry], body: bytes | None) -> list[Entry]:
    """The journal with the body put back into the request's entry. `None` as the body: its Redis
    key is gone.
    """
    if not entries or entries[0].id != REQUEST_ID or body is None:
        return list(entries)
    return [entries[0].with_body(body), *entries[1:]]


def long_questions(key: str, body_key: str) -> list[Command]:
    """The commands that read all of a journal, and the request's body."""
    return [("XRANGE", key, "-", "+"), ("GET", body_key)]


def used_by_end(last: Entry, summary: Summary) -> Usage:
    """What a request has used, by the entry that has ended it.

    Raises:
        Unreadable: the entry cannot be decoded.
    """
    return Usage.decode(last.used) if last.used else Usage(output=summary.output_tokens)


def written(last: Entry) -> CompletionStats | None:
    """What a request has written, by the last entry of its journal.

    Returns:
        None if the request has not ended, or the entry is unreadable.
    """
    try:
        summary = last.summary
        used = used_by_end(last, summary) if summary else Usage()
    except Unreadable:
        return None
    if summary is None:
        return None
    whole = last.state is State.COMPLETED and used.output > 0
    return CompletionStats(used.output, whole, summary.attempts > 0, used.prompt)


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
        self._clock = clock or RedisClock()
        self.wholes = asyncio.Semaphore(timings.WHOLES_AT_ONCE)
        """Held by whoever reads a whole journal into memory, and until it has made of it what it
        needs: an answer may have `journal.max_answer_bytes`."""

    @property
    def model(self) -> str:
        return self._settings.model.name

    def key(self, request_id: str) -> str:
        return journal_key(self._settings.namespace, request_id)

    def body_key(self, request_id: str) -> str:
        return body_key(self._settings.namespace, request_id)

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

    async def outline(self, request_id: str) -> list[Entry] | None:
        """The entries that determine a request's state, without any bytes; None if there is no
        journal.
        """
        (found,) = await self.outlines([request_id], large=False)
        return found

    async def outlines(
        self, request_ids: Sequence[str], large: bool = True
    ) -> list[list[Entry] | None]:
        """Like `outline` for many journals, in two round trips at most."""
        keys = [self.key(request_id) for request_id in request_ids]
        replies = await self._of_each([_first_questions(key) for key in keys], large)
        epochs = [_epochs_left(_put_together(found)) for found in replies]
        if any(epochs):
            questions = zip(keys, epochs, strict=True)
            more = await self._of_each([_more_questions(*one) for one in questions], large)
            replies = [[*found, *also] for found, also in zip(replies, more, strict=True)]
        return [_put_together(found) or None for found in replies]

    async def _of_each(self, questions: list[list[Command]], large: bool) -> list[list[Any]]:
        """The replies to several journals' questions, in one round trip."""
        commands = [command for asked in questions for command in asked]
        replies = iter(all_answered(await self._link.call(commands, large)))
        return [[next(replies) for _ in asked] for asked in questions]

    async def listed(self, tenant: str, after: str, at_most: int) -> list[str] | None:
        """A tenant's latest requests, newest first; see `listed`."""
        key = requests_key(self._settings.namespace, tenant)
        return await listed(self._link, key, after, at_most)

    async def stored_chats(
        self, tenant: str, after: str, newest_first: bool, at_most: int
    ) -> list[str] | None:
        """A tenant's stored chat completions; see `listed`."""
        key = chats_key(self._settings.namespace, tenant)
        return await listed(self._link, key, after, at_most, newest_first)

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
        last = await self.last(request_id)
        key, body = self.key(request_id), self.body_key(request_id)
        metadata = metadata_key(self._settings.namespace, request_id)
        replies = await self._link.call([("UNLINK", key), ("UNLINK", body, metadata)])
        deleted, _ = all_answered(replies)
        if deleted and last is not None and last.terminal:  # whoever wrote it has counted it
            size = sum(map(len, last.fields.values())) - len(last.used)
            if last.summary:
                await self._link.call(retaining(self._settings, last.summary, size, -1))

    async def kept(self, tenant: str) -> Kept:
        """What is kept now; forgets the hours that have passed.

        Args:
            tenant: whose share to tell; empty if only the total is wanted.
        """
        keys = {one: kept_key(self._settings.namespace, one) for one in (tenant, "")}
        questions = [("HGETALL", key) for key in keys.values()]
        pages = all_answered(await self._link.call(questions))
        now_hour, sums, passed = self._clock.now_ms() / timings.HOUR_MS, [], list[Command]()
        for key, page in zip(keys.values(), pages, strict=True):
            sizes = dict(zip(map(int, page[::2]), map(int, page[1::2]), strict=True))
            over = [hour for hour in sizes if hour <= now_hour]
            sums.append(sum(size for hour, size in sizes.items() if hour > now_hour))
            if over:
                passed.append(("HDEL", key, *over))
        if passed:
            await self._link.call(passed)
        return Kept(sums[0], sums[-1])

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
        questions = [_one(self.key(request_id), REQUEST_ID), ("GET", self.body_key(request_id))]
        raw, body = await self._link.call(questions, large=True)
        found = with_body([entry_from_redis(item) for item in answered(raw)], answered(body))
        return found[0] if found else None

    async def read_tails(self, request_ids: Sequence[str]) -> list[list[Entry] | None]:
        """The opening of the last attempt (if any) and the last entry of many journals, in two
        round trips; None for a journal that does not exist. If a seal below a newer opening has
        ended the request, it is included.
        """
        replies = await self._link.call(
            [
                ("XREVRANGE", self.key(request_id), "+", "-", "COUNT", "1")
                for request_id in request_ids
            ],
            large=True,
        )
        tails = {
            request_id: _of_one(raw) for request_id, raw in zip(request_ids, replies, strict=True)
        }
        more = [(name, str(at)) for name, tail in tails.items() if tail for at in _before(tail[0])]
        if more:
            replies = await self._link.call(
                [("XRANGE", self.key(name), at, at) for name, at in more], large=True
            )
            for (name, _), raw in zip(more, replies, strict=True):
                tails[name] = [*tails[name][:-1], *_of_one(raw), tails[name][-1]]
        return [tails[request_id] or None for request_id in request_ids]

    async def last(self, request_id: str) -> Entry | None:
        """The last entry; None if there is no journal."""
        (raw,) = await self._link.call(
            [("XREVRANGE", self.key(request_id), "+", "-", "COUNT", "1")], large=True
        )
        found = answered(raw)
        return entry_from_redis(found[0]) if found else None

    async def void(self, request_id: str, epoch: int, nonce: bytes) -> bool:
        """Void an opening whose answer was lost: if Redis has it, append that nobody works on it.

        Otherwise an ingress that adopts the request would wait for an attempt that its worker does
        not know of.

        Returns:
            Whether the opening was found. If not, Redis may still receive it from the lost
            connection.
        """
        key, opening = self.key(request_id), opening_id(epoch)
        (raw,) = await self._link.call([_one(key, opening)])
        found = [entry_from_redis(item) for item in answered(raw)]
        if not found or found[0].nonce != nonce:
            return False
        # Redis rejects this if a newer epoch has begun; nobody waits for this attempt then.
        voided = Entry.void(EntryId(epoch, opening.seq + 1), nonce, Cause.NOT_OPENED)
        await self._link.call([append(key, voided)])
        return True

    async def end(
        self,
        request_id: str,
        state: State,
        reason: Reason | None,
        entries: list[Entry],
        unreadable: Whose | None = None,
    ) -> Summary | None:
        """End a request from outside of an attempt: cancelled, expired, lost. The queue entry goes
        with it. A full Redis takes this, too.

        Args:
            entries: the journal as read before (its outline is enough), for the summary.
            unreadable: whose it is, if its journal cannot be decoded.

        Returns:
            The summary that this call has written; None if the request had ended already or is
            gone.

        Raises:
            RedisUnavailable: Redis cannot be reached, or it is unknown whether the request ended.
        """
        if has_ended(entries):  # nor can a summary be built from a compacted journal
            return None
        summary = _summary_of(entries, self._clock.now_ms())
        terminal = Entry.terminal_from_outside(secrets.token_bytes(8), state, reason, summary)
        queued = entries[0].queue_entry if entries else b""
        command = end(self._settings, Ended(request_id, (terminal,), summary, queued), unreadable)
        (reply,) = await self._link.call([command])
        if is_id_taken(reply):
            return None
        return summary if answered(reply) else None


def _before(last: Entry) -> Iterator[EntryId]:
    """Further entries that determine the state of a journal with this last entry: the attempt's
    opening, or the seals below it.
    """
    if last.ends or last.id.epoch == 0:
        return
    if last.id.opens:
        yield from map(seal_id, range(1, last.id.epoch))
    else:
        yield opening_id(last.id.epoch)


def _of_one(raw: Reply) -> list[Entry]:
    """One journal's reply among many: a Redis key with foreign content must not hide the others."""
    if is_of_another_type(raw):
        return []
    return [entry_from_redis(item) for item in answered(raw)]


def _first_questions(key: str) -> list[Command]:
    """The commands for the outline of a journal with one attempt, as most have."""
    return [
        _one(key, REQUEST_ID),
        *_more_questions(key, (1,)),
        # Two, because what stands before an opening or a terminal entry from outside may be a
        # seal, and says how many events there are.
        ("XREVRANGE", key, "+", "-", "COUNT", "2"),
    ]


def _more_questions(key: str, epochs: Iterable[int]) -> list[Command]:
    """The commands for the openings and seals of these attempts."""
    return [
        _one(key, entry_id) for epoch in epochs for entry_id in (opening_id(epoch), seal_id(epoch))
    ]


def _epochs_left(entries: Sequence[Entry]) -> range:
    """The attempts whose openings and seals are missing in the first answers."""
    return range(2, max((entry.id.epoch for entry in entries if not entry.terminal), default=0) + 1)


def _put_together(replies: Sequence[Any]) -> list[Entry]:
    """The entries in the answers, in order, each once and without its bytes."""
    found = {entry.id: entry for reply in replies for entry in map(entry_from_redis, reply)}
    return [found[at].without_bytes() for at in sorted(found)]


def _summary_of(entries: Sequence[Entry], ended_ms: int) -> Summary:
    """The summary in a terminal entry that is written from outside; an outline of the journal is
    enough for it.
    """
    opened = openings(entries)
    return Summary(
        request=decode_facts(entries[0], RequestFacts) if entries else None,
        attempt=decode_facts(opened[-1], AttemptFacts) if opened else None,
        attempts=opened[-1].id.epoch if opened else 0,
        ended_ms=ended_ms,
        began_ms=decode_facts(opened[0], AttemptFacts).opened_ms if opened else 0,
    )


def _one(key: str, entry_id: EntryId) -> Command:
    return ("XRANGE", key, str(entry_id), str(entry_id))
