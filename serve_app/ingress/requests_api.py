"""`/v1/requests`: list requests, show one, read its answer or events anywhere, or cancel it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from serve_app.contract import Reason, State
from serve_app.endings import Endings
from serve_app.errors import RequestRefused, Unreadable
from serve_app.ingress.event_streams import EventStreams
from serve_app.ingress.pages import invalid, listing
from serve_app.ingress.validation.headers import last_event_id
from serve_app.journal.entries import Entry, has_ended
from serve_app.journal.facts import RequestFacts, RequestLine
from serve_app.journal.ids import FIRST_OPENING_ID
from serve_app.journal.reader import JournalReader, having_read
from serve_app.journal.store import JournalStore, used_by_end
from serve_app.journal.usage import Usage
from serve_app.policy.classes import CLASSES

_A_LOOK = 50
"""Requests of which one round trip reads the state."""
_LOOKED_AT = 500
"""Most requests that one call looks at, however few of them are wanted."""


def routes(store: JournalStore, endings: Endings, streams: EventStreams) -> APIRouter:
    router = APIRouter(tags=["requests"])

    @router.get("/v1/requests", summary="Your latest requests, newest first")
    async def list_requests(
        request: Request,
        state: str = "",
        request_class: Annotated[str, Query(alias="class")] = "",
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        after: Annotated[str, Query(max_length=64)] = "",
    ) -> JSONResponse:
        _check_one_of("state", state, list(State))
        _check_one_of("class", request_class, CLASSES)
        wanted = {"state": state, "class": request_class}
        return JSONResponse(await _page(store, request.state.tenant, wanted, limit, after))

    @router.get(
        "/v1/requests/{request_id}",
        summary="State, class, replica, attempts and times of a request",
    )
    async def show(request_id: str, request: Request) -> JSONResponse:
        return JSONResponse(
            describe(request_id, await entries_of(store, request_id, request.state.tenant))
        )

    @router.get("/v1/requests/{request_id}/events", summary="The response as server-sent events")
    async def events(request_id: str, request: Request) -> Any:
        seen = last_event_id(request.headers.get("last-event-id"))
        entries = await entries_of(store, request_id, request.state.tenant)
        if request.state.head:  # without waiting for an event
            return Response(media_type="text/event-stream")
        return streams.events(request_id, request.state.tenant, seen, entries)

    @router.get(
        "/v1/requests/{request_id}/response",
        summary="The response as the POST itself would have got it, once it has ended",
    )
    async def response(request_id: str, request: Request) -> Any:
        entries = await entries_of(store, request_id, request.state.tenant)
        if request.state.head:
            return Response()
        return streams.events(request_id, request.state.tenant, 0, entries, as_events=False)

    @router.delete("/v1/requests/{request_id}", summary="Cancel a request")
    async def cancel(request_id: str, request: Request) -> JSONResponse:
        entries = await entries_of(store, request_id, request.state.tenant)
        if not has_ended(entries):
            await endings.end(request_id, State.CANCELLED, Reason.CANCELLED, entries)
            entries = await entries_of(store, request_id, request.state.tenant)
        return JSONResponse(describe(request_id, entries))

    return router


def _check_one_of(param: str, value: str, allowed: Sequence[str]) -> None:
    if value and value not in allowed:
        raise invalid(param, f"it must be one of {', '.join(allowed)}, not '{value[:40]}'")


async def _page(
    store: JournalStore, tenant: str, wanted: Mapping[str, str], limit: int, after: str
) -> dict[str, Any]:
    """A page in OpenAI's form. `last_id` is where the next one begins; the request of this id has
    another state or class if none of the last `_LOOKED_AT` ones is wanted.
    """
    data: list[dict[str, Any]] = []
    last, looked_at, more = after, 0, True
    while more and len(data) < limit and looked_at < _LOOKED_AT:
        ids = await store.listed(tenant, last, _A_LOOK + 1)
        if ids is None:
            raise invalid("after", f"no request '{after}' is listed (any more)")
        ids, more = ids[:_A_LOOK], len(ids) > _A_LOOK
        for request_id, entries in zip(ids, await store.outlines(ids), strict=True):
            if len(data) == limit:
                more = True
                break
            last, looked_at = request_id, looked_at + 1
            found = _described(request_id, entries)
            if found and all(found[name] == one for name, one in wanted.items() if one):
                data.append(found)
    first_id = data[0]["id"] if data else None
    return listing(data, first_id, last or None, more)


def known_headers(request_id: str, facts: RequestFacts) -> dict[str, str]:
    """The headers of an answer to a request that was accepted just now."""
    headers = {"x-request-id": request_id, "x-hermes-class": facts.request_class}
    if facts.client_request_id:
        headers["x-client-request-id"] = facts.client_request_id
    return headers


def accepted(request_id: str, facts: RequestFacts) -> Response:
    """The answer to a request whose client does not wait."""
    headers = {
        **known_headers(request_id, facts),
        "location": f"/v1/requests/{request_id}",
        "preference-applied": "respond-async",
    }
    first = Entry.request(RequestLine("POST", "", "", []), facts)
    return JSONResponse(describe(request_id, [first]), 202, headers)


def _described(request_id: str, entries: list[Entry] | None) -> dict[str, Any] | None:
    """A request as JSON; None if it is gone, or if nobody can read its journal: it hides no
    others.
    """
    try:
        return describe(request_id, entries) if entries else None
    except Unreadable:
        return None


def describe(request_id: str, entries: list[Entry]) -> dict[str, Any]:
    """A request as JSON. Times are Unix milliseconds; unknown values are null."""
    reader = having_read(entries)
    facts, ending = reader.facts, reader.ending
    summary = ending.summary if ending else None
    open_state = State.RUNNING if reader.attempt else State.QUEUED
    return {
        "id": request_id,
        "object": "request",
        "state": ending.state if ending else open_state,
        "reason": ending.reason if ending else None,
        "class": facts.request_class if facts else None,
        "model": facts.model if facts else None,
        "client_request_id": (facts.client_request_id or None) if facts else None,
        "replica": reader.attempt.replica if reader.attempt else None,
        "engine": reader.attempt.engine if reader.attempt else None,
        "attempts": reader.attempts,
        "events": _events(entries, reader),
        "usage": _usage(used_by_end(entries[-1], summary)) if summary else None,
        "admitted_at_ms": facts.admitted_ms if facts else None,
        "started_at_ms": reader.attempt.opened_ms if reader.attempt else None,
        "first_output_at_ms": summary.first_output_ms if summary else None,
        "ended_at_ms": summary.ended_ms if summary else None,
        "deadline_at_ms": facts.deadline_ms if facts else None,
    }


def _usage(used: Usage) -> dict[str, int]:
    return {f"{name}_tokens": count for name, count in used._asdict().items()}


def _events(entries: list[Entry], reader: JournalReader) -> int | None:
    """How many events the engine's response has so far; None if no entry of the outline says so."""
    begun = any(entry.id > FIRST_OPENING_ID and not entry.terminal for entry in entries)
    return None if begun and not any(e.counts for e in entries) else reader.last_event


async def entries_of(store: JournalStore, request_id: str, tenant: str) -> list[Entry]:
    """The outline of a request's journal. Another tenant's request gives the same 404 as one that
    does not exist.
    """
    entries = await store.outline(request_id) if len(request_id) <= 64 else None
    if not entries or _tenant(entries) != tenant:
        raise RequestRefused(
            Reason.NOT_FOUND, f"No request '{request_id[:64]}' is known (any more)."
        )
    return entries


async def request_behind(
    store: JournalStore, prefix: str, name: str, tenant: str
) -> tuple[str, list[Entry]] | None:
    """The request that an id of OpenAI's form stands for, and its outline; None if `entries_of`
    knows none.
    """
    request_id = name.removeprefix(prefix)
    if request_id == name:
        return None
    try:
        return request_id, await entries_of(store, request_id, tenant)
    except RequestRefused:
        return None


def _tenant(entries: list[Entry]) -> str | None:
    # The request itself, or a compacted journal's record of it.
    facts = having_read((entries[0], entries[-1])).facts
    return facts.tenant if facts else None
