"""Accepts requests: checks the limits, then writes journal, body and queue entry. A request is
accepted only once these are written.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

import msgspec

from serve_app import timings
from serve_app.admission.limits import AdmissionLimits
from serve_app.clock import RedisClock
from serve_app.contract import Reason
from serve_app.errors import AnswerLost, RedisUnavailable, RequestRefused
from serve_app.journal.entries import RequestFacts, RequestLine
from serve_app.journal.store import JournalStore, Kept
from serve_app.observability.logs import about
from serve_app.observability.metrics import Telemetry
from serve_app.policy.work import Work, output_bytes
from serve_app.redis.link import RedisLink
from serve_app.requests.idempotency import Held, KeyedRequests, Outrun, digest
from serve_app.requests.lifecycle import Accepted, accept
from serve_app.settings import Settings

log = logging.getLogger("hermes.ingress")


Send = Callable[[Accepted], Awaitable[object]]
Unsure = Callable[[str, RequestFacts, Callable[[], None]], None]
"""Called with the id and facts of a request that Redis may have accepted although its submitter was
told otherwise; the callee must cancel it unless somebody reads it. Call the third argument when
that is done.
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
    """Whether the request was accepted earlier, under the same idempotency key."""
    ended: bool = False
    """Whether a repeated request has ended already."""


class Admission:
    """Accepts the requests of one process, with or without a connection that waits for them."""

    def __init__(
        self,
        settings: Settings,
        store: JournalStore,
        link: RedisLink,
        limits: AdmissionLimits,
        clock: RedisClock,
        telemetry: Telemetry,
        unsure: Unsure,
    ) -> None:
        self._store = store
        self._keyed = KeyedRequests(settings, store, link)
        self._limits = limits
        self._clock = clock
        self._telemetry = telemetry
        self._unsure = unsure
        self._send: Send = partial(accept, link, settings)
        self._kept_of: dict[str, tuple[float, Kept]] = {}

    async def submit(self, submission: Submission) -> Receipt:
        """Accept a submission, or find the tenant's earlier request with the same idempotency key.

        If this is cancelled after the request was sent, or if Redis does not answer, the request is
        passed to `unsure`.

        Raises:
            RequestRefused: `queue_full`, `tenant_limit`, `storage_full`, `results_full`,
                `idempotency_conflict`, `journal_lost` if the submission continues what is not
                there.
            RedisUnavailable: Redis cannot be reached.
        """
        if submission.idempotency_key:
            return await self._submit_keyed(submission, submission.facts)
        request_id = f"req_{secrets.token_hex(16)}"
        return await self._accept(request_id, submission, submission.facts, self._send)

    async def _submit_keyed(self, submission: Submission, facts: RequestFacts) -> Receipt:
        """Accept one of several simultaneous repeats; the others find it when they look again."""
        where = (submission.line.path.encode(), submission.line.query.encode())
        facts = msgspec.structs.replace(
            facts,
            idempotency=digest(*where, submission.body),
            idempotency_value=digest(*where, submission.value) if submission.value else "",
        )
        key = (facts.tenant, submission.idempotency_key)
        held = await self._keyed.held(*key) if submission.seen else self._keyed.presumed(*key)
        for _ in range(timings.KEYED_TRIES):
            if held.facts is not None and not _same(held.facts, facts):
                raise RequestRefused(
                    Reason.IDEMPOTENCY_CONFLICT,
                    "This Idempotency-Key was used with another request; a key stands for one "
                    "request.",
                    param="idempotency-key",
                )
            if held.stands:
                return _repeat(held, facts)
            if submission.seen:
                raise RequestRefused(
                    Reason.JOURNAL_LOST,
                    "There is no answer (any more) that this Idempotency-Key could continue; send "
                    "the request without Last-Event-ID.",
                )
            send = partial(self._keyed.accept, held)
            try:
                return await self._accept(held.request_id, submission, facts, send)
            except Outrun:
                pass
            except RequestRefused:  # which a repeat is not, however many requests wait
                if not held.presumed:
                    raise
            held = await self._keyed.held(*key)
        raise RedisUnavailable("the requests of this key keep changing")

    async def _accept(
        self, request_id: str, submission: Submission, facts: RequestFacts, send: Send
    ) -> Receipt:
        if facts.kept:
            facts = await self._kept(facts, submission)
        work = submission.work
        writes_bytes = output_bytes(work.kind, work.max_output_tokens, work.sequences)
        size = len(submission.body), writes_bytes, work.sequences
        place = self._limits.enter(facts.tenant, facts.request_class, *size)
        begun = partial(self._limits.leave, place)
        try:
            await send(Accepted(request_id, submission.line, submission.body, facts, work))
        except (AnswerLost, asyncio.CancelledError):
            # Redis may have received it nevertheless, or may still receive it.
            self._unsure(request_id, facts, begun)
            raise
        except BaseException:
            begun()
            raise
        finally:
            self._limits.answered(place)
        self._telemetry.admitted(facts.request_class)
        extra = about(request_id, facts.tenant, trace=facts.trace)
        log.debug("request %s admitted: %s", request_id, facts.request_class, extra=extra)
        return Receipt(request_id, facts, begun)

    async def _kept(self, facts: RequestFacts, submission: Submission) -> RequestFacts:
        """The facts of a request whose answer is to be kept, or not to be if there is no room."""
        try:
            self._limits.check_kept(await self._kept_bytes(facts.tenant))
        except RequestRefused:
            if not submission.if_there_is_room:
                raise
            return msgspec.structs.replace(facts, retention_s=0.0, body_bytes=0)
        return facts

    async def _kept_bytes(self, tenant: str) -> Kept:
        """What is kept, as it was a moment ago: most requests pay no round trip for it."""
        now_s = self._clock.local.monotonic_s()
        read_s, kept = self._kept_of.get(tenant, (-math.inf, None))
        if kept is None or now_s - read_s >= timings.KEPT_LOOK_S:
            kept = await self._store.kept(tenant)
            self._kept_of[tenant] = now_s, kept
        return kept


def _same(earlier: RequestFacts, now: RequestFacts) -> bool:
    """Whether two requests ask for the same: byte for byte (older versions know nothing else), or
    by their meaning.
    """
    means = now.idempotency_value
    return earlier.idempotency == now.idempotency or (
        means != "" and earlier.idempotency_value == means
    )


def _repeat(held: Held, facts: RequestFacts) -> Receipt:
    extra = about(held.request_id, facts.tenant)
    log.info("request %s joined again by its Idempotency-Key", held.request_id, extra=extra)
    return Receipt(held.request_id, held.facts or facts, lambda: None, True, held.ended)
