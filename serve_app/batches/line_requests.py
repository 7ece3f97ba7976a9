"""A line of a batch as a request: how it is accepted, found again, and released.

The id of its request derives from the batch, the place of the line and the try, so whoever leads
finds it, whoever accepted it. It is detached, and is kept until its result is in a segment.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from serve_app import timings
from serve_app.batches.record import Batch
from serve_app.contract import Reason, State
from serve_app.errors import RequestRefused
from serve_app.ingress.exchange import Exchange, Exchanges
from serve_app.ingress.inference import Submissions
from serve_app.ingress.validation.bodies import Validator
from serve_app.journal.reader import Ending
from serve_app.journal.usage import Usage
from serve_app.policy.classes import BATCH
from serve_app.policy.tenant_limits import Limits
from serve_app.policy.tenants import Tenant
from serve_app.redis.connection import Command
from serve_app.redis.keyspace import body_key, journal_key, later_request_key, metadata_key
from serve_app.redis.link import RedisLink
from serve_app.redis.replies import all_answered
from serve_app.requests.endings import Endings
from serve_app.requests.idempotency import first_id
from serve_app.requests.lifecycle import retaining
from serve_app.requests.store import JournalStore
from serve_app.settings import Settings

_LARGE_AT_ONCE = 4


class LineAnswer(NamedTuple):
    """What has become of a line's request."""

    ending: Ending
    status: int
    body: bytes


@dataclass(eq=False)
class LineRequests:
    """The requests of lines, in the ingress that leads.

    Args:
        tenant: whose batch it is, as its policy is now; None if the policy has no such tenant.
    """

    settings: Settings
    exchanges: Exchanges
    submissions: Submissions
    validator: Validator
    endings: Endings
    link: RedisLink
    store: JournalStore
    tenant: Callable[[str], Tenant | None]
    large: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_LARGE_AT_ONCE))
    """Held while a large body is in memory, until Redis has it."""

    def request_id(self, batch: Batch, place: int, number: int) -> str:
        """Of a try of a line."""
        return first_id(batch.facts.tenant, _key(batch, place, number))

    async def submit(self, batch: Batch, place: int, number: int, body: bytes) -> Exchange:
        """Accept the request of a try of a line, or join it. Raises `RequestRefused`."""
        facts, tenant = batch.facts, self.tenant(batch.facts.tenant)
        if tenant is None:
            message = f"The policy has no tenant '{facts.tenant}' any more."
            raise RequestRefused(Reason.KEY_NOT_PERMITTED, message)
        most_output = tenant.limits.max_output_tokens
        limits = Limits(tokens_per_month=tenant.limits.tokens_per_month)  # no other counts lines
        tenant = tenant._replace(key_id=facts.key, limits=limits, classes=(BATCH,))
        request, body, _ = await self.validator.validate(facts.endpoint, body, most_output)
        model = request.get("model")
        tenant.check_model(model or facts.model, facts.model)
        headers = {
            "content-type": "application/json",
            "idempotency-key": _key(batch, place, number),
            "prefer": "respond-async",
            "x-hermes-class": BATCH,
        }
        longest = self.validator.most_tokens
        submission = self.submissions.of(
            tenant, facts.endpoint, "", headers, body, request, "", model, longest
        )
        left_s = max(0.0, (facts.expires_ms - submission.facts.admitted_ms) / 1000)
        its = msgspec.structs.replace(
            submission.facts,
            deadline_ms=facts.expires_ms,
            retention_s=min(
                left_s + timings.BATCH_LINE_KEPT_S, self.settings.journal.max_retention_s
            ),
            body_bytes=0,
            tells="",  # the batch's end is told, not each line's
            batch=facts.id,
        )
        return await self.exchanges.submit(submission._replace(facts=its))

    async def attach(self, batch: Batch, request_id: str, ended: bool) -> Exchange:
        """Follow a request that there is."""
        path = batch.facts.endpoint
        return await self.exchanges.attach(request_id, path, 0, over=ended, as_events=False)

    async def answer(self, batch: Batch, exchange: Exchange) -> LineAnswer:
        """Wait until a request has ended."""
        body = await exchange.until_ended()
        reader, path = exchange.follower.reader, batch.facts.endpoint
        ending, head = reader.ending, reader.head
        assert ending is not None, "it has ended"
        if head is not None and (body or ending.state is State.COMPLETED):
            return LineAnswer(ending, head.status, body)
        refusal = RequestRefused(ending.reason or Reason.INTERNAL, ending.message)
        return LineAnswer(ending, refusal.status_at(path), refusal.body(path))

    async def end(self, request_ids: Sequence[str], reason: Reason) -> None:
        """End those that have not ended; of what is withdrawn, only what no worker has begun."""
        records = zip(request_ids, await self.store.records(request_ids), strict=True)
        kept = (State.RUNNING,) if reason is Reason.WITHDRAWN else ()
        await asyncio.gather(
            *(
                self.endings.end(request_id, reason, record)
                for request_id, record in records
                if record is not None and record.state not in kept
            )
        )

    async def release(self, request_ids: Sequence[str]) -> None:
        """Delete requests that have ended, and whose lines have no result."""
        _, commands = await self.releasing(request_ids)
        all_answered(await self.link.call(commands))

    async def releasing(self, request_ids: Sequence[str]) -> tuple[Usage, list[Command]]:
        """What requests that have ended have used, and the commands that delete them."""
        used, kept, commands = Usage(), Counter[Command](), list[Command]()
        namespace, records = self.settings.namespace, await self.store.records(request_ids)
        for request_id, record in zip(request_ids, records, strict=True):
            keys = (
                journal_key(namespace, request_id),
                body_key(namespace, request_id),
                metadata_key(namespace, request_id),
                later_request_key(namespace, request_id),
            )
            commands.append(("UNLINK", *keys))
            if record is not None and record.summary is not None:
                used = Usage(*map(sum, zip(used, record.used or Usage(), strict=True)))
                for command in retaining(self.settings, record.summary, record.size, -1):
                    if command[0] == "HINCRBY":
                        kept[command[1:3]] += command[3]
        commands += [("HINCRBY", *where, size) for where, size in kept.items()]
        return used, commands


def _key(batch: Batch, place: int, number: int) -> str:
    """No client can send this key, which has line feeds."""
    return f"batch\n{batch.facts.id}\n{place}\n{number}"
