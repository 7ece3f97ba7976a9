"""`/v1/responses/{id}`: OpenAI's way to fetch, cancel and delete a response.

Everything is read from the journal, by any ingress; a response in the background is no other.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from serve_app.contract import Reason, State
from serve_app.endings import Endings
from serve_app.errors import RedisUnavailable, RequestRefused, error_body
from serve_app.ingress.event_streams import EventStream, EventStreams
from serve_app.ingress.refusals import journal_unavailable
from serve_app.ingress.requests_api import entries_of, invalid, known_headers
from serve_app.journal.entries import Entry, has_ended
from serve_app.journal.events import SEPARATOR
from serve_app.journal.facts import RequestFacts
from serve_app.journal.reader import JournalReader
from serve_app.journal.store import JournalStore

_PREFIX = "resp_"
_LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed")


def queued(request_id: str, facts: RequestFacts) -> Response:
    """The answer to a response in the background that was accepted just now."""
    return JSONResponse(
        _unfinished(request_id, facts, State.QUEUED), headers=known_headers(request_id, facts)
    )


def routes(store: JournalStore, endings: Endings, streams: EventStreams) -> APIRouter:
    """The endpoints."""
    router = APIRouter(tags=["responses"])

    async def found(response_id: str, request: Request) -> tuple[str, list[Entry]]:
        request_id = response_id.removeprefix(_PREFIX)
        try:
            return request_id, await entries_of(store, request_id, request.state.tenant)
        except RequestRefused as refusal:
            if refusal.reason is not Reason.NOT_FOUND:
                raise
            message = f"Response with id '{response_id[:64]}' not found."
            raise RequestRefused(Reason.NOT_FOUND, message, param="id") from None

    async def cancelled(request_id: str, entries: list[Entry]) -> None:
        if not has_ended(entries):
            await endings.end(request_id, State.CANCELLED, Reason.CANCELLED, entries)

    @router.get("/v1/responses/{response_id}", summary="A response, or its events")
    async def retrieve(
        response_id: str,
        request: Request,
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=0, le=2**53)] = None,
    ) -> Any:
        request_id, entries = await found(response_id, request)
        if stream and not request.state.head:
            if not _was_streamed(entries):
                raise invalid("stream", "the response was not created with stream=true")
            seen = 0 if starting_after is None else starting_after + 1  # we count from 1
            return EventStream(streams, request_id, request.state.tenant, seen, entries)
        return JSONResponse(await _response(store, request_id, entries))

    @router.post("/v1/responses/{response_id}/cancel", summary="Cancel a response")
    async def cancel(response_id: str, request: Request) -> JSONResponse:
        request_id, entries = await found(response_id, request)
        try:
            await cancelled(request_id, entries)
        except RedisUnavailable:
            raise journal_unavailable() from None
        _, entries = await found(response_id, request)
        return JSONResponse(await _response(store, request_id, entries))

    @router.delete("/v1/responses/{response_id}", summary="Cancel and forget a response")
    async def delete(response_id: str, request: Request) -> JSONResponse:
        request_id, entries = await found(response_id, request)
        try:
            await cancelled(request_id, entries)
            await store.forget(request_id)
        except RedisUnavailable:
            raise journal_unavailable() from None
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    return router


def _was_streamed(outline: list[Entry]) -> bool:
    reader = JournalReader()
    for entry in outline:
        reader.feed(entry)
    return reader.facts is not None and reader.facts.streamed


async def _response(store: JournalStore, request_id: str, outline: list[Entry]) -> Any:
    """The response as OpenAI's object, whatever its state."""
    ended = has_ended(outline)
    try:
        entries = await store.read(request_id) if ended else outline
    except RedisUnavailable:
        raise journal_unavailable() from None
    reader, body = JournalReader(), []
    for entry in entries or outline:
        reader.feed(entry)
    while reader.more:
        body.append(reader.take())
    facts, ending = reader.facts, reader.ending
    assert facts is not None, "it has a tenant"
    if ending is None:
        state = State.RUNNING if reader.attempt else State.QUEUED
        return _unfinished(request_id, facts, state)
    answer = _answered(b"".join(body), reader.streams)
    if ending.state is State.COMPLETED and answer:
        return {**answer, "background": facts.detached}
    reason = ending.reason or Reason.INTERNAL
    error = error_body(reason, ending.message)["error"]
    return _unfinished(request_id, facts, ending.state, error)


def _answered(body: bytes, streamed: bool) -> dict[str, Any]:
    """The object in an answer; empty if there is none."""
    if not streamed:
        found = msgspec.json.decode(body) if body else {}
        return found if isinstance(found, dict) else {}
    for event in reversed(body.split(SEPARATOR)):
        data = event.partition(b"data: ")[2]
        if any(f'"{name}"'.encode() in event for name in _LAST_EVENTS):
            found = msgspec.json.decode(data)["response"]
            assert isinstance(found, dict)
            return found
    return {}


def _unfinished(
    request_id: str, facts: RequestFacts, state: State, error: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A response without an answer."""
    status = state if state in (State.QUEUED, State.CANCELLED) else State.FAILED
    failed = error is not None and status is State.FAILED
    return {
        "id": f"{_PREFIX}{request_id}",
        "object": "response",
        "created_at": facts.admitted_ms // 1000,
        "status": "in_progress" if state is State.RUNNING else status,
        "background": facts.detached,
        "model": facts.model,
        "error": {"code": error["code"], "message": error["message"]} if failed and error else None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "output": [],
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": None,
    }
