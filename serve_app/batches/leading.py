"""The steps of the one ingress that works on a model's batches: each one round trip.

Whoever leads for a model that is served also ends the batches of those that nobody serves any more.
Its lease is a token in Redis. Every step compares it, so that an ingress that has lost its lease
changes nothing any more, however late its commands come.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple, TypeVar

import msgspec

from serve_app import timings
from serve_app.batches.lines import LineError
from serve_app.batches.record import SCRIPT, Batch, BatchState, batch_from_redis
from serve_app.clock import RedisClock
from serve_app.errors import HermesError, RedisUnavailable, Unreadable
from serve_app.files.storage import StorageUnavailable
from serve_app.journal.usage import Usage
from serve_app.loops import backoff
from serve_app.redis.connection import Command, as_arguments
from serve_app.redis.keyspace import (
    batch_key,
    batch_leader_key,
    batch_lines_key,
    batch_news_key,
    batch_segments_key,
    batch_tokens_key,
    open_batches_key,
)
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import all_answered
from serve_app.settings import Settings
from serve_app.webhooks.events import BATCH
from serve_app.webhooks.outbox import telling

log = logging.getLogger("hermes.batches")

T = TypeVar("T")

_A_LOOK = 100
"""Batches that one round trip reads."""
FIRST_TRY = 1


class Deposed(HermesError):
    """Another ingress leads, or what Redis has is not what this one has made of it: whoever leads
    reads all batches again.
    """


class Marked(NamedTuple):
    """What a segment has of the results of a batch."""

    places: Sequence[int]
    completed: int
    failed: int
    usage: Usage
    releasing: Sequence[Command]
    """Deletes their requests."""


class Closed(NamedTuple):
    """How a batch ends, and the ids of its files."""

    outcome: BatchState
    output_file_id: str
    error_file_id: str


class Leading:
    """The steps of one ingress while it leads, or tries to. They raise `RedisUnavailable` if Redis
    cannot be reached or it is unknown whether they have changed something; each may be repeated.
    """

    def __init__(self, link: RedisLink, waiting: RedisLink, settings: Settings, clock: RedisClock):
        self._link = link
        self._waiting = waiting
        self._settings = settings
        self._clock = clock
        self._namespace, self.model = settings.namespace, settings.model.name
        self._models: Sequence[str] = ()
        """Those whose leases it has."""
        self.token = secrets.token_hex(16)

    async def lead(self, unserved: Iterable[str] = ()) -> bool:
        """Take the lease of its model, or renew it, and those of models that nobody serves. Returns
        whether this ingress leads for its model now.
        """
        models = list(dict.fromkeys([self.model, *unserved]))
        leads = await self._each_lease(models, "lead", self.token, timings.BATCH_LEASE_MS)
        self._models = [model for model, leading in zip(models, leads, strict=True) if leading]
        return self.model in self._models

    async def resign(self) -> None:
        """Give the leases up. The next ones have another token."""
        token, self.token = self.token, secrets.token_hex(16)
        await self._each_lease(self._models, "resign", token)

    async def _each_lease(self, models: Sequence[str], *step: object) -> Sequence[Any]:
        keys = [batch_leader_key(self._namespace, model) for model in models]
        asked = [("EVAL", SCRIPT, 1, key, *step) for key in keys]
        return all_answered(await self._link.call(asked))

    async def stop(self) -> None:
        await self._waiting.close()

    async def news(self, within_s: float) -> list[str]:
        """The ids of batches that were created or cancelled; waits for so long until there are
        some.
        """
        key = batch_news_key(self._namespace, self.model)
        found = await self._waiting.wait(("BZPOPMIN", key, within_s))
        first = all_answered([found])[0]
        if not first:
            return []
        more = all_answered(await self._link.call([("ZPOPMIN", key, _A_LOOK)]))[0]
        return [one.decode() for one in (first[1], *more[::2])]

    async def open(self) -> AsyncIterator[list[Batch]]:
        """The batches that are not over, of its model and of those that nobody serves, in pages."""
        for model in self._models:
            key = open_batches_key(self._namespace, model)
            (ids,) = all_answered(await self._link.call([("ZRANGE", key, 0, -1)]))
            for at in range(0, len(ids), _A_LOOK):
                some = [one.decode() for one in ids[at : at + _A_LOOK]]
                found = await self.read(some)
                gone = set(some) - {one.facts.id for one in found}
                for batch_id in gone:
                    log.error("batch %s is gone or cannot be read", batch_id)
                if over := [*gone, *(one.facts.id for one in found if one.state.over)]:
                    all_answered(await self._link.call([("ZREM", key, *over)]))
                yield found

    async def over_since(self, ids: Sequence[str], since_ms: int) -> set[str]:
        """Those of them that are not over, or ended since then (Unix ms), of whatever model."""
        found = set[str]()
        for at in range(0, len(ids), _A_LOOK):
            batches = await self.read(ids[at : at + _A_LOOK])
            found |= {one.facts.id for one in batches if not 0 < one.over_ms <= since_ms}
        return found

    async def read(self, ids: Sequence[str]) -> list[Batch]:
        """Those of them that there are."""
        asked = [("HGETALL", batch_key(self._namespace, one)) for one in ids]
        found: list[Batch] = []
        for reply in all_answered(await self._link.call(asked)):
            try:
                batch = batch_from_redis(reply)
            except Unreadable as error:
                log.error("a batch cannot be read: %s", error)
            else:
                found += [batch] if batch is not None else []
        return found

    async def lines(self, batch: Batch) -> dict[int, int]:
        """The places of the lines that are taken and have no result, and the try of each."""
        asked = [("HGETALL", self._lines(batch))]
        (found,) = all_answered(await self._link.call(asked))
        return dict(zip(map(int, found[::2]), map(int, found[1::2]), strict=True))

    async def segments(self, batch: Batch) -> list[str]:
        asked = ("ZRANGE", self._segments(batch), 0, -1)
        (found,) = all_answered(await self._link.call([asked]))
        return [one.decode() for one in found]

    async def checked(self, batch: Batch, lines: int, tokens: int, most_tokens: int) -> int | None:
        """Its lines may be taken. If its tenant's batches would take more tokens than `most_tokens`
        (0: any number), they may not; returns the tokens of the others then.
        """
        given = batch.facts.id, lines, tokens, most_tokens, self._clock.now_ms()
        others: int = await self._step(
            "checked", *self._keys(batch, self._tokens(batch)), given=given
        )
        return None if others < 0 else others

    async def take(self, batch: Batch, most: int) -> range:
        """The places of the next lines, which are taken from now on."""
        keys = self._keys(batch, self._lines(batch))
        first, many = await self._step("take", *keys, given=(most,))
        return range(first, first + many)

    async def turn(
        self, batch: Batch, place: int, was: int, now: int, releasing: Sequence[Command] = ()
    ) -> None:
        """A line goes on with another try."""
        keys = self._keys(batch, self._lines(batch))
        await self._done("turn", *keys, given=(place, was, now, *as_arguments(releasing)))

    async def mark(self, batch: Batch, segment: str, marked: Marked) -> None:
        """The results of these lines are in a segment in the storage."""
        keys = self._keys(batch, self._lines(batch), self._segments(batch))
        places = (len(marked.places), *marked.places)
        given = (segment, marked.completed, marked.failed, *marked.usage, *places)
        await self._done("mark", *keys, given=(*given, *as_arguments(marked.releasing)))

    async def close(self, batch: Batch, closed: Closed) -> Closed:
        """From now on no line is taken or marked. Returns how it was closed first."""
        at_ms = min(self._clock.now_ms(), batch.facts.expires_ms)  # as `Batches.get` has told
        keys, given = self._keys(batch, self._lines(batch)), (*closed, at_ms)
        outcome, output, error = await self._done("close", *keys, given=given)
        return Closed(BatchState(outcome.decode()), output.decode(), error.decode())

    async def over(
        self, batch: Batch, closed: Closed, unfinished: int, errors: Sequence[LineError] = ()
    ) -> None:
        """It has ended like that, of which webhooks tell. `unfinished`: lines without a result."""
        facts, now_ms = batch.facts, self._clock.now_ms()
        of_lines = self._lines(batch), self._segments(batch), self._tokens(batch)
        listed = (make(self._namespace, facts.model) for make in (open_batches_key, batch_news_key))
        lifetime_ms = int(self._settings.batches.retention_days * 24 * timings.HOUR_MS)
        told = msgspec.json.encode(errors) if errors else ""
        given = (facts.id, *closed, unfinished, told, now_ms, lifetime_ms)
        its = f"{BATCH}.{closed.outcome}", facts.id, facts.tenant, now_ms, facts.webhook
        telling_all = as_arguments(telling(self._settings, *its))
        keys = self._keys(batch, *of_lines, *listed)
        await self._step("over", *keys, given=(*given, *telling_all))

    def _keys(self, batch: Batch, *more: str) -> tuple[str, ...]:
        leader = batch_leader_key(self._namespace, batch.facts.model)
        return (leader, batch_key(self._namespace, batch.facts.id), *more)

    def _lines(self, batch: Batch) -> str:
        return batch_lines_key(self._namespace, batch.facts.id)

    def _segments(self, batch: Batch) -> str:
        return batch_segments_key(self._namespace, batch.facts.id)

    def _tokens(self, batch: Batch) -> str:
        return batch_tokens_key(self._namespace, batch.facts.tenant)

    async def _done(self, step: str, *keys: str, given: Sequence[Any]) -> Any:
        if not (reply := await self._step(step, *keys, given=given)):
            raise Deposed(f"batches: Redis has other lines than were taken ({step})")
        return reply

    async def _step(self, step: str, *keys: str, given: Sequence[Any]) -> Any:
        asked = ("EVAL", SCRIPT, len(keys), *keys, step, self.token, *given)
        (reply,) = all_answered(await self._link.call([asked]))
        if reply is None:
            raise Deposed("batches: another ingress leads, or a batch is gone")
        return reply


async def insist(batch: Batch, what: str, step: Callable[[], Awaitable[T]]) -> T:
    """Repeat a step until storage and Redis let it pass."""
    for failures in count(1):
        try:
            return await step()
        except (RedisUnavailable, StorageUnavailable) as error:
            level = logging.WARNING if failures == 3 else logging.DEBUG
            log.log(level, "batch %s: cannot %s yet: %s", batch.facts.id, what, error)
        await asyncio.sleep(backoff(timings.BATCH_RETRY_S, failures))
    raise AssertionError("it counts without an end")
