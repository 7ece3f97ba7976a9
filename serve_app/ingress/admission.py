"""Admit: decide what a request is, write its journal and its queue entry. Only then is it accepted."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from serve_app.errors import AnswerLost, JournalUnavailable, Reason, RequestRefused
from serve_app.ingress.client_ids import client_request_id
from serve_app.ingress.departures import Departures
from serve_app.ingress.waiting_room import WaitingRoom
from serve_app.journal.entries import RequestFacts, RequestLine
from serve_app.journal.hub import Follower, FollowerHub
from serve_app.journal.keyed import KeyedRequests, Outrun, digest
from serve_app.journal.store import JournalStore
from serve_app.logs import about
from serve_app.redis_clock import RedisClock
from serve_app.request_queue.queue import Depth, RequestQueue
from serve_app.routing.key import session_key
from serve_app.scheduling.order import CLASSES, DEFAULT_CLASS, SERVICE_TIERS
from serve_app.settings import Settings
from serve_app.storage import Storage
from serve_app.telemetry import Telemetry

log = logging.getLogger("hermes.ingress")

_RETRY_AFTER_S = 1.0
_MOST_TOKENS = 2**31 - 1
_LOOKS = 5
# What the engine's server may need; credentials and cookies never enter the journal.
_KEPT_HEADERS = ("content-type", "accept")

_Admit = Callable[[RequestLine, bytes, RequestFacts, tuple[str, Mapping[str, Any]]], Awaitable[None]]


class Admission:
    """The door of one ingress."""

    def __init__(
        self, settings: Settings, store: JournalStore, keyed: KeyedRequests, queue: RequestQueue, hub: FollowerHub,
        departures: Departures, telemetry: Telemetry, clock: RedisClock, storage: Storage, room: WaitingRoom,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._store = store
        self._keyed = keyed
        self._queue = queue
        self._hub = hub
        self._departures = departures
        self._telemetry = telemetry
        self._clock = clock
        self._storage = storage
        self._room = room
        self._depths: Mapping[str, Depth] = {}

    def on_depths(self, depths: Mapping[str, Depth]) -> None:
        """The lines as they were a moment ago; what was admitted since is small against their bounds."""
        self._depths = depths

    async def admit(
        self, tenant: str, path: str, query: str, headers: Mapping[str, str], body: bytes, request: Mapping[str, Any],
        trace: str,
    ) -> tuple[Follower, RequestFacts]:  # fmt: skip
        """Accept a checked request, or attach to an earlier one of the tenant's with the same `Idempotency-Key`.

        Args:
            trace: the `traceparent` under which it is worked on; empty where it is not traced.

        Returns:
            The follower that reads its journal, and what was decided about it.

        Raises:
            RequestRefused: `queue_full`, `tenant_limit`, `storage_full`, `journal_unavailable`,
                `idempotency_conflict`, or a header that makes no sense.
        """
        facts = self._decide(tenant, headers, request, trace)
        key = headers.get("idempotency-key", "")
        within_s = self._settings.redis.admission_timeout_s
        try:
            async with asyncio.timeout(within_s):
                if not key:
                    request_id = f"req_{secrets.token_hex(16)}"
                    admit = partial(self._store.admit, request_id)
                    return await self._accept(request_id, path, query, headers, body, request, facts, admit)
                digested = digest(path.encode(), query.encode(), body)
                facts = msgspec.structs.replace(facts, idempotency=digested)
                return await self._attach_or_accept(key, path, query, headers, body, request, facts)
        except (JournalUnavailable, TimeoutError) as error:
            log.warning(
                "request refused: journal_unavailable: %s",
                str(error) or f"not accepted in {within_s:g} s",
                extra=about("", tenant, Reason.JOURNAL_UNAVAILABLE, trace),
            )
            raise RequestRefused(
                Reason.JOURNAL_UNAVAILABLE,
                "The service cannot accept requests at the moment; please try again.",
                retry_after_s=_RETRY_AFTER_S,
            ) from None

    async def _attach_or_accept(
        self, key: str, path: str, query: str, headers: Mapping[str, str], body: bytes, request: Mapping[str, Any],
        facts: RequestFacts,
    ) -> tuple[Follower, RequestFacts]:  # fmt: skip
        """Of many repeats at once one is accepted, and the others find it when they look again."""
        for _ in range(_LOOKS):
            held = await self._keyed.held(facts.tenant, key)
            if held.facts is not None and held.facts.idempotency != facts.idempotency:
                raise RequestRefused(
                    Reason.IDEMPOTENCY_CONFLICT,
                    "This Idempotency-Key was used with another request; a key stands for one request.",
                    param="idempotency-key",
                )
            if held.stands:
                extra = about(held.request_id, facts.tenant)
                log.info("request %s attached to again, by its key", held.request_id, extra=extra)
                return await self._departures.attach(held.request_id, 0, held.ended), held.facts or facts
            admit = partial(self._keyed.admit, held)
            with suppress(Outrun):
                return await self._accept(held.request_id, path, query, headers, body, request, facts, admit)
        raise JournalUnavailable("the requests of this key keep changing")

    async def _accept(
        self, request_id: str, path: str, query: str, headers: Mapping[str, str], body: bytes,
        request: Mapping[str, Any], facts: RequestFacts, admit: _Admit,
    ) -> tuple[Follower, RequestFacts]:  # fmt: skip
        depth = self._depths.get(facts.request_class)
        bound = self._settings.queue.max_waiting(facts.request_class)
        if depth is not None and depth.waiting >= bound:
            raise RequestRefused(
                Reason.QUEUE_FULL,
                f"{depth.waiting} requests of class '{facts.request_class}' wait already; please try again later.",
                retry_after_s=_RETRY_AFTER_S,
            )
        ticket = self._room.enter(facts.tenant, facts.request_class, len(body))
        try:
            taken_bytes = self._storage.take(len(body))
        except RequestRefused:
            self._room.leave(ticket)
            raise
        line = RequestLine("POST", path, query, [(k, headers[k]) for k in _KEPT_HEADERS if k in headers])
        cost = _cost_tokens(body, request)
        entry = self._queue.fields(request_id, facts.tenant, facts.session, facts.deadline_ms, cost, trace=facts.trace)
        follower = self._hub.follow_new(request_id)
        follower.on_begun = lambda: self._room.leave(ticket)
        try:
            await admit(line, body, facts, (self._queue.stream(facts.request_class), entry))
        except (AnswerLost, asyncio.CancelledError):  # Redis may have it all the same, or get it yet
            self._departures.unsure(follower)
            raise
        except BaseException:
            self._hub.leave(follower)
            follower.begun()
            raise
        finally:
            self._storage.answered(taken_bytes)
        self._telemetry.admitted(facts.request_class)
        extra = about(request_id, facts.tenant, trace=facts.trace)
        log.debug("request %s admitted: %s", request_id, facts.request_class, extra=extra)
        return follower, facts

    def _decide(self, tenant: str, headers: Mapping[str, str], request: Mapping[str, Any], trace: str) -> RequestFacts:
        now_ms = self._clock.now_ms()
        return RequestFacts(
            request_class=_request_class(headers, request),
            tenant=tenant,
            session=session_key(headers, request),
            model=self._settings.model.name,
            streamed=request.get("stream") is True,
            admitted_ms=now_ms,
            deadline_ms=now_ms + int(self._timeout_s(headers) * 1000),
            wake=self._hub.channel,
            client_request_id=client_request_id(headers),
            trace=trace,
        )

    def _timeout_s(self, headers: Mapping[str, str]) -> float:
        text = headers.get("x-request-timeout-seconds")
        if text is None:
            return self._settings.ingress.request_timeout_s
        try:
            timeout_s = float(text)
        except ValueError:
            timeout_s = -1.0
        if not 0 < timeout_s < float("inf"):
            raise RequestRefused(
                Reason.INVALID_REQUEST,
                f"The header x-request-timeout-seconds must be a positive number of seconds, not '{text[:40]}'.",
                param="x-request-timeout-seconds",
            )
        return min(timeout_s, self._settings.ingress.max_request_timeout_s)


def _request_class(headers: Mapping[str, str], request: Mapping[str, Any]) -> str:
    named = headers.get("x-hermes-class")
    if named is not None:
        if named not in CLASSES:
            raise RequestRefused(
                Reason.INVALID_REQUEST,
                f"The header x-hermes-class must be one of {', '.join(CLASSES)}, not '{named[:40]}'.",
                param="x-hermes-class",
            )
        return named
    tier = request.get("service_tier")
    return SERVICE_TIERS.get(tier, DEFAULT_CLASS) if isinstance(tier, str) else DEFAULT_CLASS


def _cost_tokens(body: bytes, request: Mapping[str, Any]) -> int:
    """A first estimate: four bytes a token in, and what may come out."""
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        limit = request.get(name)
        if isinstance(limit, int):
            return len(body) // 4 + min(max(limit, 0), _MOST_TOKENS)
    return len(body) // 4 + 256
