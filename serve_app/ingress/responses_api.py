"""`/v1/responses/{id}`: OpenAI's way to fetch, cancel and delete a response.

Everything is read from the journal, by any ingress; a response in the background is no other.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from serve_app.contract import RESPONSES, Reason, State
from serve_app.endings import Endings
from serve_app.errors import RequestRefused, error_body
from serve_app.ingress.conversations import PREFIX, answer, items_of
from serve_app.ingress.event_streams import EventStreams
from serve_app.ingress.pages import invalid, not_found, page
from serve_app.ingress.requests_api import known_headers, request_behind
from serve_app.ingress.response_object import completed, unfinished
from serve_app.journal.entries import Entry, decode_line, has_ended
from serve_app.journal.facts import RequestFacts
from serve_app.journal.ids import REQUEST_ID
from serve_app.journal.reader import having_read
from serve_app.journal.store import JournalStore


async def queued(request_id: str, facts: RequestFacts, body: bytes) -> Response:
    """The answer to a response in the background that was accepted just now."""
    made = await asyncio.to_thread(unfinished, request_id, facts, body, State.QUEUED)
    headers = known_headers(request_id, facts)
    return Response(made, headers=headers, media_type="application/json")


def routes(store: JournalStore, endings: Endings, streams: EventStreams) -> APIRouter:
    """The endpoints."""
    router = APIRouter(tags=["responses"])

    async def found(response_id: str, request: Request) -> tuple[str, list[Entry]]:
        known = await request_behind(store, PREFIX, response_id, request.state.tenant)
        if known is None or not _of_a_response(known[1][0]):
            raise _not_found(response_id)
        return known

    async def ended(response_id: str, request: Request) -> str:
        request_id, entries = await found(response_id, request)
        if not has_ended(entries):
            await endings.end(request_id, State.CANCELLED, Reason.CANCELLED, entries)
        return request_id

    def whole(request_id: str, tenant: str, outline: list[Entry]) -> Response:
        """A response as OpenAI's object, whatever its state."""

        async def make() -> bytes:
            async with store.wholes:
                if has_ended(outline):
                    entries, asked = await store.whole(request_id)
                else:
                    entries, (asked, _) = outline, await store.asked(request_id)
                return await asyncio.to_thread(_object, request_id, entries or outline, asked)

        return streams.json(tenant, make)

    @router.get("/v1/responses/{response_id}", summary="A response, or its events")
    async def retrieve(
        response_id: str,
        request: Request,
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=0, le=2**53)] = None,
    ) -> Any:
        request_id, entries = await found(response_id, request)
        if request.state.head:
            return Response(media_type="application/json")
        if stream:
            facts = having_read(entries).facts
            if facts is None or not facts.streamed:
                raise invalid("stream", "the response was not created with stream=true")
            seen = 0 if starting_after is None else starting_after + 1  # we count from 1
            return streams.events(request_id, request.state.tenant, seen, entries)
        return whole(request_id, request.state.tenant, entries)

    @router.get("/v1/responses/{response_id}/input_items", summary="What a response was asked")
    async def input_items(
        response_id: str,
        request: Request,
        order: Literal["asc", "desc"] = "desc",
        after: Annotated[str, Query(max_length=200)] = "",
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
    ) -> Response:
        request_id, _ = await found(response_id, request)

        async def make() -> bytes:
            async with store.wholes:
                asked, _ = await store.asked(request_id)
                if asked is None:
                    raise _not_found(response_id)
                return await asyncio.to_thread(_input_items, request_id, asked, order, after, limit)

        return streams.json(request.state.tenant, make)

    @router.post("/v1/responses/{response_id}/cancel", summary="Cancel a response")
    async def cancel(response_id: str, request: Request) -> Any:
        await ended(response_id, request)
        request_id, entries = await found(response_id, request)
        return whole(request_id, request.state.tenant, entries)

    @router.delete("/v1/responses/{response_id}", summary="Cancel and forget a response")
    async def delete(response_id: str, request: Request) -> JSONResponse:
        await store.forget(await ended(response_id, request))
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    return router


def _not_found(response_id: str) -> RequestRefused:
    return not_found("Response", response_id)


def _of_a_response(first: Entry) -> bool:
    """Whether this begins the journal of a response; what remains of one that ended may be."""
    return first.id != REQUEST_ID or decode_line(first).path == RESPONSES


def _object(request_id: str, entries: list[Entry], asked: bytes | None) -> bytes:
    """The object that a journal, or the outline of one that has not ended, says.

    Args:
        asked: the body of its request; None if it is not kept (any more).

    Raises:
        RequestRefused: `not_found`, if it is the journal of another endpoint.
    """
    reader, fields = answer(entries)
    facts, ending = reader.facts, reader.ending
    assert facts is not None, "it has a tenant"
    if ending is None:
        state = State.RUNNING if reader.attempt else State.QUEUED
        return unfinished(request_id, facts, asked, state)
    if ending.state is not State.COMPLETED:
        error = error_body(ending.reason or Reason.INTERNAL, ending.message)["error"]
        return unfinished(request_id, facts, asked, ending.state, error)
    if fields is None:
        raise _not_found(PREFIX + request_id)
    return completed(facts, asked, fields)


def _input_items(request_id: str, asked: bytes, order: str, after: str, limit: int) -> bytes:
    """A page of a response's input; an item without an id is named by its place.

    Raises:
        RequestRefused: `not_found`, if it is the body of another endpoint.
    """
    try:
        items = items_of(asked)
    except LookupError:
        raise _not_found(PREFIX + request_id) from None
    named = []
    for number, item in enumerate(items):
        fields = msgspec.json.decode(item, type=dict[str, msgspec.Raw])
        given = fields.get("id") or msgspec.Raw(b"null")
        name = str(msgspec.json.decode(given) or f"item_{request_id}_{number}")
        kind = msgspec.Raw(b'"message"')
        named.append((name, {"type": kind, **fields, "id": name}))
    return msgspec.json.encode(page(named, order, after, limit))
