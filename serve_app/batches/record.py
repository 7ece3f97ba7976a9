"""What Redis knows of batches, and what a client may do with them: each one round trip.

`batches.lua` has the scripts; `leading.py` the steps of the leader, who works on them. Of a line
Redis knows nothing but its try while it is worked on: lines from `next` on are not taken, those in
`{ns}:batch_lines:<id>` are, and all others have a result in a segment in the storage.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from enum import StrEnum
from importlib.resources import files
from typing import Any

import msgspec

from serve_app import timings
from serve_app.batches.lines import LineError
from serve_app.clock import RedisClock
from serve_app.contract import Reason
from serve_app.errors import RequestRefused, decoding
from serve_app.journal.usage import Usage
from serve_app.policy.tenant_limits import Limits
from serve_app.redis.connection import Script
from serve_app.redis.keyspace import (
    batch_key,
    batch_news_key,
    batch_tokens_key,
    batches_key,
    open_batches_key,
)
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import all_answered
from serve_app.requests.idempotency import digest
from serve_app.settings import Settings

SCRIPT = Script(files(__package__).joinpath("batches.lua").read_text())


class BatchState(StrEnum):
    """OpenAI's words. The last four are final."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    FAILED = "failed"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def over(self) -> bool:
        return self in _OVER


_BEGINNING = (BatchState.VALIDATING, BatchState.IN_PROGRESS)
_OVER = (BatchState.FAILED, BatchState.COMPLETED, BatchState.EXPIRED, BatchState.CANCELLED)


class BatchFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was decided when a batch was created. Times are Unix milliseconds."""

    id: str
    tenant: str
    key: str
    """The name of the API key that it came with."""
    model: str
    """The served model, whose ingresses work on it."""
    endpoint: str
    input_file_id: str
    input_path: str
    """Of the input file in the storage."""
    input_bytes: int
    created_ms: int
    expires_ms: int
    """Its deadline."""
    completion_window: str
    metadata: dict[str, str] | None = None
    window: str = ""
    """Of the day, in which its lines begin; empty: always."""
    output_expires_s: int = 0
    """How long its output files are kept; 0: until they are deleted."""
    continued_from: str = ""
    """The id of the batch whose failed and expired lines it has."""
    retried_path: str = ""
    """Of the error file in the storage, whose lines alone it has; empty: all."""
    webhook: str = ""
    """A URL that is told of its end, beside the receivers of the settings."""
    value: str = ""
    """Digest of what was asked, for comparison under an `Idempotency-Key`."""


class Batch(msgspec.Struct, frozen=True):
    """A batch as it is now. Times are Unix milliseconds; what is 0 has not come yet."""

    facts: BatchFacts
    state: BatchState
    total: int = 0
    """Lines, once they were checked."""
    completed: int = 0
    failed: int = 0
    """Lines with an error, when the batch is over also those that were not worked on."""
    next: int = 0
    """Place of the first line that is not taken, in the order of work."""
    usage: Usage = Usage()
    errors: Sequence[LineError] = ()
    """Why it failed."""
    outcome: str = ""
    """Its final state, once that is certain."""
    output_file_id: str = ""
    error_file_id: str = ""
    """Both while it is `finalizing` or `cancelling` perhaps of files that are not there yet."""
    in_progress_ms: int = 0
    finalizing_ms: int = 0
    completed_ms: int = 0
    failed_ms: int = 0
    expired_ms: int = 0
    cancelling_ms: int = 0
    cancelled_ms: int = 0

    @property
    def over_ms(self) -> int:
        """0 while it is not over."""
        return max(self.completed_ms, self.failed_ms, self.expired_ms, self.cancelled_ms)

    def ends(self, now_ms: int) -> bool:
        """Whether no line of it begins any more."""
        ending = self.state is BatchState.CANCELLING or self.outcome
        return bool(ending) or now_ms >= self.facts.expires_ms


TIMES = tuple(name for name in Batch.__struct_fields__ if name.endswith("_ms"))
_NUMBERS = ("total", "completed", "failed", "next", *TIMES)
_ID_CHARS = 64
_errors = msgspec.json.Decoder(list[LineError])


@decoding
def batch_from_redis(reply: Sequence[bytes]) -> Batch | None:
    """The batch in a reply to `HGETALL`; None if there is none."""
    if not reply:
        return None
    found: Mapping[str, bytes] = dict(zip(map(bytes.decode, reply[::2]), reply[1::2], strict=True))
    more: dict[str, Any] = {name: int(found[name]) for name in _NUMBERS if name in found}
    return Batch(
        msgspec.json.decode(found["facts"], type=BatchFacts),
        BatchState(found["state"].decode()),
        usage=Usage(*(int(found.get(name, 0)) for name in Usage._fields)),
        errors=_errors.decode(found["errors"]) if found.get("errors") else (),
        outcome=found.get("outcome", b"").decode(),
        output_file_id=found.get("output_file", b"").decode(),
        error_file_id=found.get("error_file", b"").decode(),
        **more,
    )


def new_batch_id(tenant: str, key: str = "") -> str:
    """The id of a new batch; of the same `Idempotency-Key` of a tenant always the same."""
    value = digest(b"batch", tenant.encode(), key.encode()) if key else secrets.token_hex(16)
    return f"batch_{value}"


class Batches:
    """The batches of all tenants. What asks Redis raises `RedisUnavailable` if it cannot be
    reached, or it is unknown whether it has changed something.
    """

    def __init__(self, link: RedisLink, settings: Settings, clock: RedisClock) -> None:
        self._link = link
        self._settings = settings
        self._clock = clock

    async def create(self, facts: BatchFacts, limits: Limits, tokens: int = 0) -> Batch:
        """Create a batch, or find the one that exists under this id.

        Args:
            limits: its tenant's.
            tokens: what its lines may take; 0 if that is known only once its file is checked.

        Raises:
            RequestRefused: `idempotency_conflict`; `tenant_limit` if the tenant has too many
                batches that are not over, or they take too many of its `background_tokens`.
        """
        namespace, batches = self._settings.namespace, self._settings.batches
        keys = (
            batch_key(namespace, facts.id),
            batches_key(namespace, facts.tenant),
            batch_tokens_key(namespace, facts.tenant),
            open_batches_key(namespace, facts.model),
            batch_news_key(namespace, facts.model),
        )
        lifetime_ms = (
            facts.expires_ms - facts.created_ms + int(batches.retention_days * 24 * timings.HOUR_MS)
        )
        times = facts.created_ms, facts.expires_ms, lifetime_ms
        most = batches.max_open_per_tenant, limits.background_tokens
        given = (facts.id, msgspec.json.encode(facts), *times, tokens, *most)
        asked = ("EVAL", SCRIPT, len(keys), *keys, "create", *given)
        ((found, number, *its),) = all_answered(await self._link.call([asked]))
        if found in (b"many", b"tokens"):
            raise _too_much(found == b"many", number, tokens, batches.max_open_per_tenant, limits)
        batch = batch_from_redis(its[0])
        assert batch is not None, "it was created"
        if found == b"exists" and batch.facts.value != facts.value:
            raise RequestRefused(
                Reason.IDEMPOTENCY_CONFLICT,
                "This Idempotency-Key was used for another batch; a key stands for one batch.",
                param="idempotency-key",
            )
        return batch

    async def get(self, tenant: str, batch_id: str) -> Batch | None:
        """None if there is no such batch (any more), or it is another tenant's. Once its deadline
        has passed it is `finalizing`, even while the storage cannot be reached.
        """
        if len(batch_id) > _ID_CHARS:
            return None
        (found,) = await self._read([batch_id])
        return found if found is not None and found.facts.tenant == tenant else None

    async def listed(
        self, tenant: str, after: str, limit: int
    ) -> tuple[Sequence[Batch], bool] | None:
        """Up to so many batches of a tenant, the newest first, and whether there are more.

        Args:
            after: the id behind which the page begins; empty for the first page. None is returned
                if it is not listed (any more).
        """
        key, first = batches_key(self._settings.namespace, tenant), 0
        if after:
            (rank,) = all_answered(await self._link.call([("ZREVRANK", key, after)]))
            if rank is None:
                return None
            first = rank + 1
        page = ("ZREVRANGE", key, first, first + limit)
        (ids,) = all_answered(await self._link.call([page]))
        found = await self._read([one.decode() for one in ids[:limit]])
        return [one for one in found if one is not None], len(ids) > limit

    async def cancel(self, tenant: str, batch_id: str) -> Batch | None:
        """Ask that a batch ends: it is `cancelling` from now on, unless its lines have ended, or
        it is over. None as `get`.
        """
        batch = await self.get(tenant, batch_id)
        if batch is None:
            return None
        namespace = self._settings.namespace
        keys = batch_key(namespace, batch_id), batch_news_key(namespace, batch.facts.model)
        asked = ("EVAL", SCRIPT, len(keys), *keys, "cancel", batch_id, self._clock.now_ms())
        (found,) = all_answered(await self._link.call([asked]))
        return batch_from_redis(found)

    async def _read(self, ids: Sequence[str]) -> list[Batch | None]:
        questions = [("HGETALL", batch_key(self._settings.namespace, one)) for one in ids]
        found = map(batch_from_redis, all_answered(await self._link.call(questions)))
        return [one and self._told(one) for one in found]

    def _told(self, batch: Batch) -> Batch:
        its, late_ms = batch.state, batch.facts.expires_ms
        if its not in _BEGINNING or self._clock.now_ms() < late_ms:
            return batch
        return msgspec.structs.replace(batch, state=BatchState.FINALIZING, finalizing_ms=late_ms)


def _too_much(
    many: bool, number: int, tokens: int, most_open: int, limits: Limits
) -> RequestRefused:
    if many:
        message = f"You have {number} batches that are not over, of at most {most_open}"
    else:
        message = (
            f"Your batches that are not over take {number:,} tokens, and this one {tokens:,}, of "
            f"at most {limits.background_tokens:,}"
        )
    message += "; wait until one is over, or cancel one."
    return RequestRefused(Reason.TENANT_LIMIT, message, retry_after_s=60.0, jitter=0.1)
