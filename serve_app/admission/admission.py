"""Accepts requests: checks the limits, then writes journal, body and queue entry. A request is
accepted only once these are written.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from serve_app import timings
from serve_app.admission.limits import AdmissionLimits, TenantLimits
from serve_app.contract import Reason
from serve_app.errors import AnswerLost, RedisUnavailable, RequestRefused
from serve_app.foundation import Foundation
from serve_app.journal.entries import RequestFacts, RequestLine
from serve_app.observability.ingress_metrics import TenantTelemetry
from serve_app.observability.logs import about
from serve_app.policy.overload import Asked
from serve_app.policy.tenant_limits import NO_LIMITS, Limits, Standing
from serve_app.policy.work import Work, output_bytes, writes_tokens
from serve_app.requests.idempotency import KeyedRequests, Outrun, digest
from serve_app.requests.lifecycle import Answer, Offer, accept
from serve_app.requests.store import Kept

log = logging.getLogger("hermes.ingress")

Unsure = Callable[[str, RequestFacts, Callable[[], None]], None]
"""Called with the id and facts of a request that Redis may have accepted although its submitter was
told otherwise: cancels it unless somebody reads it, and then calls the third argument.
"""


class Submission(NamedTuple):
    """A validated request to be accepted, whatever its source."""

    facts: RequestFacts
    """What is decided about it so far."""
    line: RequestLine
    body: bytes
    """As the client sent it."""
    work: Work
    idempotency_key: str = ""
    """A tenant's submissions with the same key are one request; empty: it is one of its own."""
    value: bytes = b""
    """The body's meaning, for comparison under that key; empty if it is not known."""
    seen: int = 0
    """The number of the last event that the client has of the answer to its key; if it has any,
    only an earlier request will do.
    """
    if_there_is_room: bool = False
    """Whether it is accepted, and not kept, where too much is kept already."""
    limits: Limits = NO_LIMITS
    """Its tenant's."""


class Receipt(NamedTuple):
    """The accepted request. Whoever wants its answer follows its journal from now on: what was
    written meanwhile is read from there.
    """

    request_id: str
    facts: RequestFacts
    begun: Callable[[], None]
    """Call it when a worker has started the request, or when none will. Until then the request
    counts against the limits on waiting requests.
    """
    repeat: bool = False
    """Whether the request was accepted earlier: under the same idempotency key, or for a client
    that sends it again because its ingress has died.
    """
    ended: bool = False
    """Whether a repeated request has ended already."""
    standing: Standing | None = None
    """What its tenant has used of its limits, if it has any."""


@dataclass(eq=False)
class Admission:
    """Accepts the requests of one process, with or without a connection that waits for them."""

    base: Foundation
    limits: AdmissionLimits
    unsure: Unsure
    of_tenants: TenantLimits
    tenants: TenantTelemetry
    _kept_of: dict[str, tuple[float, Kept]] = field(default_factory=dict, init=False)
    """What is kept of each tenant, and when that was read."""

    def __post_init__(self) -> None:
        self._keyed = KeyedRequests(self.base.settings, self.base.store, self.base.link)

    async def submit(self, submission: Submission) -> Receipt:
        """Accept a submission, or find the tenant's earlier request with the same idempotency key.

        If this is cancelled after the request was sent, or if Redis does not answer, the request is
        passed to `unsure`.

        Raises:
            RequestRefused: `queue_full`, `overloaded`, `tenant_limit`, `storage_full`,
                `results_full`, `rate_limit_exceeded`, `concurrency_limit`, `quota_exceeded`,
                `idempotency_conflict`, `journal_lost` if the submission continues what is not
                there.
            RedisUnavailable: Redis cannot be reached.
        """
        if submission.idempotency_key:
            return await self._submit_keyed(submission)
        joins = self.base.settings.ingress.lost_reader_grace_s and not submission.facts.detached
        if joins and writes_tokens(submission.work.kind):  # others are as cheap to compute again
            submission = submission._replace(facts=_with_twins(submission))
        send = partial(accept, self.base.link, self.base.settings)
        return await self._accept(f"req_{secrets.token_hex(16)}", submission, send)

    async def _submit_keyed(self, submission: Submission) -> Receipt:
        """Accept one of several simultaneous repeats; the others find it when they look again."""
        where = (submission.line.path.encode(), submission.line.query.encode())
        facts = msgspec.structs.replace(
            submission.facts,
            idempotency=digest(*where, submission.body),
            idempotency_value=digest(*where, submission.value) if submission.value else "",
        )
        submission = submission._replace(facts=facts)
        key = (facts.tenant, submission.idempotency_key)
        held = await self._keyed.held(*key) if submission.seen else self._keyed.presumed(*key)
        standing: Standing | None = None
        for _ in range(timings.KEYED_TRIES):
            if held.facts is not None and not _same(held.facts, facts):
                raise RequestRefused(
                    Reason.IDEMPOTENCY_CONFLICT,
                    "This Idempotency-Key was used with another request; a key stands for one "
                    "request.",
                    param="idempotency-key",
                )
            if held.stands:
                request_id, extra = held.request_id, about(held.request_id, facts.tenant)
                log.info("request %s joined again by its Idempotency-Key", request_id, extra=extra)
                its = held.facts or facts
                return Receipt(request_id, its, lambda: None, True, held.ended, standing)
            if submission.seen:
                raise RequestRefused(
                    Reason.JOURNAL_LOST,
                    "There is no answer (any more) that this Idempotency-Key could continue; send "
                    "the request without Last-Event-ID.",
                )
            try:
                send = partial(self._keyed.accept, held)
                return await self._accept(held.request_id, submission, send)
            except Outrun as outrun:
                standing = outrun.standing
            except RequestRefused:  # which a repeat is not, however many requests wait
                if not held.presumed:
                    raise
            held = await self._keyed.held(*key)
        raise RedisUnavailable("the requests of this key keep changing")

    async def _accept(
        self,
        request_id: str,
        submission: Submission,
        send: Callable[[Offer], Awaitable[Answer]],
    ) -> Receipt:
        _, line, body, work, *_ = submission
        limits, path, asked = submission.limits, line.path, _asked(submission)
        facts = self.of_tenants.reserve(submission.facts, asked, limits, path)
        if self.of_tenants.asks_first(facts, limits, path):
            answer = await send(Offer(request_id, line, body, facts, work, limits, asks=True))
            self._check(facts, answer, path)
            if answer.request_id:
                return self._joined(answer, facts)
        if facts.kept and not await self._may_keep(facts.tenant, submission.if_there_is_room):
            facts = msgspec.structs.replace(facts, retention_s=0.0, body_bytes=0)
        writes_bytes = output_bytes(work.kind, work.max_output_tokens, work.sequences)
        waiting = self.limits.enter(asked, len(body), writes_bytes)
        begun = partial(self.limits.leave, waiting)
        try:
            answer = await send(Offer(request_id, line, body, facts, work, limits))
            self._check(facts, answer, path)
        except (AnswerLost, asyncio.CancelledError):
            # Redis may have received it nevertheless, or may still receive it.
            self.unsure(request_id, facts, begun)
            raise
        except BaseException:
            begun()
            raise
        finally:
            self.limits.answered(waiting)
        if answer.request_id != request_id:
            begun()
            return self._joined(answer, facts)
        self.base.telemetry.count("hermes_requests_admitted", facts.request_class)
        self.tenants.admitted(facts.tenant)
        extra = about(request_id, facts.tenant, trace=facts.trace)
        log.debug("request %s admitted: %s", request_id, facts.request_class, extra=extra)
        return Receipt(request_id, facts, begun, standing=answer.standing)

    def _check(self, facts: RequestFacts, answer: Answer, path: str) -> None:
        if answer.standing is not None:
            self.tenants.stands(facts.tenant, answer.standing)
        self.of_tenants.check(facts, answer.standing, path)

    def _joined(self, answer: Answer, facts: RequestFacts) -> Receipt:
        request_id = answer.request_id
        extra = about(request_id, facts.tenant, trace=facts.trace)
        self.base.telemetry.count("hermes_requests_joined")
        log.info("request %s joined by its client: its ingress has died", request_id, extra=extra)
        return Receipt(request_id, facts, lambda: None, True, standing=answer.standing)

    async def _may_keep(self, tenant: str, if_there_is_room: bool) -> bool:
        """Whether one more answer of a tenant is kept, by what was kept a moment ago: most requests
        pay no round trip for it. Refuses the request if it is not, unless `if_there_is_room`.
        """
        now_s = self.base.clock.local.monotonic_s()
        read_s, kept = self._kept_of.get(tenant, (-math.inf, None))
        if kept is None or now_s - read_s >= timings.KEPT_LOOK_S:
            kept = await self.base.store.kept(tenant)
            self._kept_of[tenant] = now_s, kept
        try:
            self.limits.check_kept(kept)
        except RequestRefused:
            if not if_there_is_room:
                raise
            return False
        return True


def _with_twins(submission: Submission) -> RequestFacts:
    """The facts, with what an equal request of the same API key and session has in common."""
    facts, line = submission.facts, submission.line
    of = facts.tenant, facts.key, facts.session, facts.model, facts.alias, facts.request_class
    where = (part.encode() for part in (*of, line.path, line.query))
    return msgspec.structs.replace(facts, twins=digest(*where, submission.body))


def _asked(submission: Submission) -> Asked:
    """The request as the order of work sees it."""
    facts, line, body, work, *_ = submission
    what = facts.twins or facts.idempotency or digest(line.path.encode(), body)
    return Asked(
        facts.request_class,
        facts.tenant,
        facts.admitted_ms,
        facts.deadline_ms,
        work.prompt_tokens,
        work.max_output_tokens,
        work.sequences,
        work.kind,
        facts.detached,
        digest(facts.tenant.encode(), what.encode())[:8],
    )


def _same(earlier: RequestFacts, now: RequestFacts) -> bool:
    """Whether two requests ask for the same, byte for byte or by their meaning."""
    means = now.idempotency_value
    return earlier.idempotency == now.idempotency or (
        means != "" and earlier.idempotency_value == means
    )
