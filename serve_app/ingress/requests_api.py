"""`/v1/requests/{id}`: look at a request, read its events from anywhere, cancel it."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from serve_app.errors import JournalUnavailable, Reason, RequestRefused
from serve_app.ingress.answer import Answer
from serve_app.ingress.runtime import Ingress
from serve_app.journal.entries import Entry, RequestLine, decode_line, has_ended
from serve_app.journal.reader import JournalReader
from serve_app.logs import about

log = logging.getLogger("hermes.ingress")


def routes(ingress: Ingress) -> APIRouter:
    """The three endpoints."""
    router = APIRouter(tags=["requests"])

    @router.get("/v1/requests/{request_id}", summary="State, class, replica, attempts and times of a request")
    async def show(request_id: str, request: Request) -> JSONResponse:
        return JSONResponse(describe(request_id, await _entries(ingress, request_id, request.state.tenant)))

    @router.get("/v1/requests/{request_id}/events", summary="The response as server-sent events")
    async def events(request_id: str, request: Request) -> Any:
        seen = _last_event_id(request.headers.get("last-event-id"))
        entries = await _entries(ingress, request_id, request.state.tenant)
        return _Events(ingress, request_id, request.state.tenant, seen, entries)

    @router.delete("/v1/requests/{request_id}", summary="Cancel a request")
    async def cancel(request_id: str, request: Request) -> JSONResponse:
        entries = await _entries(ingress, request_id, request.state.tenant)
        if not has_ended(entries):
            try:
                ended = await ingress.store.end(request_id, "cancelled", Reason.CANCELLED, entries)
            except JournalUnavailable:
                raise _unavailable() from None
            if ended:
                ingress.telemetry.ended("", "cancelled", Reason.CANCELLED)
                extra = about(request_id, request.state.tenant, Reason.CANCELLED)
                log.info("request %s ended: cancelled (cancelled)", request_id, extra=extra)
            entries = await _entries(ingress, request_id, request.state.tenant)
        return JSONResponse(describe(request_id, entries))

    return router


class _Events(Response):
    """Follows a request for one of its tenant's readers; FastAPI passes it through as it is."""

    def __init__(self, ingress: Ingress, request_id: str, tenant: str, seen: int, entries: list[Entry]) -> None:
        super().__init__()
        self._ingress = ingress
        self._request_id = request_id
        self._tenant = tenant
        self._seen = seen
        self._entries = entries

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with self._ingress.readers.of_events.taken(self._tenant):
            await self._ingress.readers.serve(await self._answer(), scope, receive, send)

    async def _answer(self) -> Answer:
        ingress = self._ingress
        try:
            follower = await ingress.departures.attach(self._request_id, self._seen, has_ended(self._entries))
        except JournalUnavailable:
            raise _unavailable() from None
        facts, line = follower.reader.facts, _line(self._entries)
        return Answer(
            follower, ingress.departures, ingress.deadlines, line.path if line else "", streamed=True,
            as_events=True, admitted_ms=facts.admitted_ms if facts else 0,
            deadline_ms=facts.deadline_ms if facts else 0, heartbeat_s=ingress.settings.ingress.heartbeat_s,
        )  # fmt: skip


def describe(request_id: str, entries: list[Entry]) -> dict[str, Any]:
    """A request as JSON. Times are Unix milliseconds; what is not known yet is null."""
    reader = JournalReader()
    for entry in entries:
        reader.feed(entry)
    facts, ending = reader.facts, reader.ending
    summary = ending.summary if ending else None
    state = ending.state if ending else ("running" if reader.attempt else "queued")
    return {
        "id": request_id,
        "object": "request",
        "state": state,
        "reason": (ending.reason or None) if ending else None,
        "class": facts.request_class if facts else None,
        "model": facts.model if facts else None,
        "client_request_id": (facts.client_request_id or None) if facts else None,
        "replica": reader.attempt.replica if reader.attempt else None,
        "engine": reader.attempt.engine if reader.attempt else None,
        "attempts": reader.attempts,
        "events": reader.last_event,
        "output_tokens": summary.output_tokens if summary else None,
        "admitted_at_ms": facts.admitted_ms if facts else None,
        "started_at_ms": reader.attempt.opened_ms if reader.attempt else None,
        "first_output_at_ms": summary.first_output_ms if summary else None,
        "ended_at_ms": summary.ended_ms if summary else None,
        "deadline_at_ms": facts.deadline_ms if facts else None,
    }


async def _entries(ingress: Ingress, request_id: str, tenant: str) -> list[Entry]:
    """The outline of a request's journal. Another tenant's is as unknown as one that never was."""
    try:
        entries = await ingress.store.outline(request_id) if len(request_id) <= 64 else None
    except JournalUnavailable:
        raise _unavailable() from None
    if not entries or _tenant(entries) != tenant:
        raise RequestRefused(Reason.NOT_FOUND, f"No request '{request_id[:64]}' is known (any more).")
    return entries


def _tenant(entries: list[Entry]) -> str | None:
    reader = JournalReader()
    for entry in (entries[0], entries[-1]):  # the request itself, or what a compacted journal says of it
        reader.feed(entry)
    return reader.facts.tenant if reader.facts else None


def _line(entries: list[Entry]) -> RequestLine | None:
    return decode_line(entries[0]) if b"r" in entries[0].fields else None


def _last_event_id(text: str | None) -> int:
    if text is None or text == "":
        return 0
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise RequestRefused(
            Reason.INVALID_REQUEST, "The header Last-Event-ID must be the number of an event.", param="last-event-id"
        )
    return int(text)


def _unavailable() -> RequestRefused:
    return RequestRefused(
        Reason.JOURNAL_UNAVAILABLE, "The journal cannot be reached at the moment; please try again.", retry_after_s=1
    )
