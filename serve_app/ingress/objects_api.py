"""The endpoints for what is stored: `/v1/requests`; OpenAI's ways to fetch, cancel and delete a
response (`/v1/responses/{id}`); and stored chat completions (`store: true`).

Everything is read from the journals and bodies of requests, by any ingress.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial, wraps
from inspect import signature
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app import timings
from serve_app.contract import CHATS, RESPONSES, Reason, State
from serve_app.errors import RequestRefused, Unreadable, invalid_value
from serve_app.files.storage import PIECE_BYTES
from serve_app.ingress.connection_limits import ConnectionLimits, Uploads
from serve_app.ingress.exchange import Exchanges, known_headers
from serve_app.ingress.objects import (
    CHAT,
    RESPONSE,
    chat_object,
    listing,
    named_input_items,
    not_found,
    page,
    request_object,
    response_object,
    unanswered_response,
    wanted_page,
)
from serve_app.ingress.validation.fields import METADATA, Schema, check
from serve_app.ingress.validation.structure import read
from serve_app.journal.entries import Entry, RequestFacts, RequestLine
from serve_app.journal.events import last_event_id
from serve_app.policy.classes import CLASSES
from serve_app.requests.endings import Endings
from serve_app.requests.record import Record
from serve_app.requests.store import JournalStore
from serve_app.settings.limits import RequestLimits

_UPDATE: Schema = {
    "type": ["object"],
    "required": ["metadata"],
    "properties": {"metadata": METADATA},
}
_A_LOOK = 50
"""Requests of which one round trip reads the state."""
_LOOKED_AT = 500
"""Most requests or chats that one call looks at, however few of them are wanted."""
_PAGE_BYTES = 8 << 20
"""A page of chats that has reached this size ends early."""
_Order = Literal["asc", "desc"]
_Limit = Annotated[int, Query(ge=1, le=100)]
_Id = Annotated[str, Query(max_length=200)]


class _Reading(Response):
    """Holds a place among `ingress.max_readers` while it answers. FastAPI returns it unchanged."""

    def __init__(self, place: AbstractContextManager[None], answer: ASGIApp) -> None:
        super().__init__()
        self._place = place
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._place:
            await self._answer(scope, receive, send)


class Readers:
    """Answers whoever reads what is stored at one ingress: with a request's events, or with JSON
    that may be as large as what is stored.
    """

    def __init__(self, exchanges: Exchanges, limits: ConnectionLimits) -> None:
        self._exchanges = exchanges
        self._unread = limits.unread
        self._making = asyncio.Lock()
        """One at a time: making 6 MB of JSON holds Python's lock for 10 ms again and again."""
        self.connections = limits.event_readers

    def events(
        self, request: Request, request_id: str, record: Record, seen: int, as_events: bool = True
    ) -> Response:
        """The response of a request after event `seen`. `as_events`: whether also an answer that
        was not streamed comes as an event.
        """
        tenant = request.state.tenant

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            if record.ended:
                self._unread.check(tenant)
            its = request_id, record.path, seen, record.ended
            exchange = await self._exchanges.attach(*its, as_events)
            await exchange(scope, receive, send)

        return _Reading(self.connections.hold(tenant), run)

    def json(self, request: Request, make: Callable[[], Awaitable[Any]]) -> Response:
        """What `make` makes, an object or one that is encoded, once there is room for another
        reader and for that.
        """
        tenant = request.state.tenant

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            async with self._making:
                self._unread.check(tenant)
                made = await make()
                if not isinstance(made, bytes):
                    made = await asyncio.to_thread(msgspec.json.encode, made)
                answer = Response(made, media_type="application/json")
                size = len(answer.body) if len(answer.body) > timings.LARGE_BYTES else 0
                self._unread.count(tenant, size)
            try:
                await answer(scope, receive, send)
            finally:
                self._unread.release(tenant, size)

        return _Reading(self.connections.hold(tenant), run)

    def endpoint(
        self, make: Callable[..., Awaitable[Any]]
    ) -> Callable[..., Coroutine[Any, Any, Response]]:
        """The function of a route that answers as `json`; `make` has the parameters of the route,
        waits for no client, and is called one at a time.
        """

        @wraps(make)
        async def answer(request: Request, **given: Any) -> Response:
            return self.json(request, partial(make, request=request, **given))

        told = signature(make).replace(return_annotation=Response)
        answer.__signature__ = told  # type: ignore[attr-defined]  # FastAPI reads it
        return answer

    def pieces(
        self, request: Request, pieces: AsyncIterator[bytes], status: int, headers: dict[str, str]
    ) -> Response:
        """What comes in pieces, of which one is in memory at a time."""
        tenant = request.state.tenant

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            self._unread.check(tenant)
            self._unread.count(tenant, PIECE_BYTES)
            try:
                await StreamingResponse(pieces, status, headers)(scope, receive, send)
            finally:
                self._unread.release(tenant, PIECE_BYTES)

        return _Reading(self.connections.hold(tenant), run)


# -- whose it is ----------------------------------------------------------------------------------


async def record_of(store: JournalStore, request_id: str, tenant: str) -> Record:
    """What is known of a request. Another tenant's gets the same 404 as one that does not exist."""
    record = await store.record(request_id) if len(request_id) <= 64 else None
    if record is None or record.facts is None or record.facts.tenant != tenant:
        raise RequestRefused(
            Reason.NOT_FOUND, f"No request '{request_id[:64]}' is known (any more)."
        )
    _ = record.attempt  # if nobody can read it, the client is told before an answer begins
    return record


async def _behind(
    store: JournalStore, prefix: str, what: str, name: str, request: Request
) -> tuple[str, Record]:
    """The request that an id of OpenAI's form stands for, and its record."""
    request_id = name.removeprefix(prefix)
    if request_id != name:
        with suppress(RequestRefused):
            return request_id, await record_of(store, request_id, request.state.tenant)
    raise not_found(what, name)


# -- requests -------------------------------------------------------------------------------------


def request_routes(store: JournalStore, endings: Endings, readers: Readers) -> APIRouter:
    router = APIRouter(tags=["requests"])

    @router.get("/v1/requests", summary="Your latest requests, newest first")
    async def list_requests(
        request: Request,
        state: str = "",
        request_class: Annotated[str, Query(alias="class")] = "",
        limit: _Limit = 20,
        after: Annotated[str, Query(max_length=64)] = "",
    ) -> JSONResponse:
        _check_one_of("state", state, list(State))
        _check_one_of("class", request_class, CLASSES)
        ids = await store.listed(request.state.tenant, after, _LOOKED_AT + 1)
        if ids is None:
            raise invalid_value("after", f"no request '{after}' is listed (any more)")
        wanted = {"state": state, "class": request_class}
        looks = _look(store, ids[:_LOOKED_AT], {k: v for k, v in wanted.items() if v})
        # Where the next page begins: the request of this id is not wanted if none of these is.
        data, last, more = await wanted_page(ids, looks, limit)
        first = data[0]["id"] if data else None
        return JSONResponse(listing(data, first, last or after or None, more))

    @router.get(
        "/v1/requests/{request_id}",
        summary="State, class, replica, attempts and times of a request",
    )
    async def show(request_id: str, request: Request) -> JSONResponse:
        record = await record_of(store, request_id, request.state.tenant)
        return JSONResponse(request_object(request_id, record))

    @router.get("/v1/requests/{request_id}/events", summary="The response as server-sent events")
    async def events(request_id: str, request: Request) -> Any:
        seen = last_event_id(request.headers.get("last-event-id"))
        record = await record_of(store, request_id, request.state.tenant)
        if request.state.head:  # without waiting for an event
            return Response(media_type="text/event-stream")
        return readers.events(request, request_id, record, seen)

    @router.get(
        "/v1/requests/{request_id}/response",
        summary="The response as the POST itself would have got it, once it has ended",
    )
    async def response(request_id: str, request: Request) -> Any:
        record = await record_of(store, request_id, request.state.tenant)
        if request.state.head:
            return Response()
        return readers.events(request, request_id, record, 0, as_events=False)

    @router.delete("/v1/requests/{request_id}", summary="Cancel a request")
    async def cancel(request_id: str, request: Request) -> JSONResponse:
        record = await record_of(store, request_id, request.state.tenant)
        if not record.ended:
            await endings.end(request_id, Reason.CANCELLED, record)
            record = await record_of(store, request_id, request.state.tenant)
        return JSONResponse(request_object(request_id, record))

    return router


def _check_one_of(param: str, value: str, allowed: Sequence[str]) -> None:
    if value and value not in allowed:
        raise invalid_value(param, f"it must be one of {', '.join(allowed)}, not '{value[:40]}'")


async def _look(
    store: JournalStore, ids: Sequence[str], wanted: Mapping[str, str]
) -> AsyncIterator[dict[str, Any] | None]:
    """Each of these requests; None for one that is not wanted, is gone, or whose journal nobody can
    read: it hides no others.
    """
    for begin in range(0, len(ids), _A_LOOK):
        some = ids[begin : begin + _A_LOOK]
        for request_id, record in zip(some, await store.records(some), strict=True):
            try:
                found = request_object(request_id, record) if record else None
            except Unreadable:
                found = None
            yield found if found and wanted.items() <= found.items() else None


def accepted(request_id: str, facts: RequestFacts) -> Response:
    """The answer to a request whose client does not wait."""
    headers = {
        **known_headers(request_id, facts),
        "location": f"/v1/requests/{request_id}",
        "preference-applied": "respond-async",
    }
    first = Entry.request(RequestLine("POST", "", "", []), facts)
    return JSONResponse(request_object(request_id, Record([first])), 202, headers)


# -- responses ------------------------------------------------------------------------------------


async def queued(request_id: str, facts: RequestFacts, body: bytes) -> Response:
    """The answer to a response in the background that was accepted just now."""
    made = await asyncio.to_thread(unanswered_response, request_id, facts, body, State.QUEUED)
    headers = known_headers(request_id, facts)
    return Response(made, headers=headers, media_type="application/json")


def response_routes(store: JournalStore, endings: Endings, readers: Readers) -> APIRouter:
    router = APIRouter(tags=["responses"])

    async def found(response_id: str, request: Request) -> tuple[str, Record]:
        known = await _behind(store, RESPONSE, "Response", response_id, request)
        if known[1].path not in (RESPONSES, ""):  # it is trimmed
            raise not_found("Response", response_id)
        return known

    async def ended(response_id: str, request: Request) -> str:
        request_id, record = await found(response_id, request)
        if not record.ended:
            await endings.end(request_id, Reason.CANCELLED, record)
        return request_id

    def whole(request_id: str, request: Request, record: Record) -> Response:
        """A response as OpenAI's object, whatever its state."""

        async def make() -> bytes:
            async with store.wholes:
                if record.ended:
                    entries, asked = await store.whole(request_id)
                else:
                    entries, (asked, _) = [], await store.asked(request_id)
                read = request_id, entries or record.entries, asked
                return await asyncio.to_thread(response_object, *read)

        return readers.json(request, make)

    @router.get("/v1/responses/{response_id}", summary="A response, or its events")
    async def retrieve(
        response_id: str,
        request: Request,
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=0, le=2**53)] = None,
    ) -> Any:
        request_id, record = await found(response_id, request)
        if request.state.head:
            return Response(media_type="application/json")
        if stream:
            if record.facts is None or not record.facts.streamed:
                raise invalid_value("stream", "the response was not created with stream=true")
            seen = 0 if starting_after is None else starting_after + 1  # we count from 1
            return readers.events(request, request_id, record, seen)
        return whole(request_id, request, record)

    @router.get("/v1/responses/{response_id}/input_items", summary="What a response was asked")
    @readers.endpoint
    async def input_items(
        response_id: str,
        request: Request,
        order: _Order = "desc",
        after: _Id = "",
        limit: _Limit = 20,
    ) -> bytes:
        request_id, _ = await found(response_id, request)

        def made(asked: bytes) -> bytes:
            named = named_input_items(request_id, asked)
            return msgspec.json.encode(page(named, order, after, limit))

        async with store.wholes:
            asked, _ = await store.asked(request_id)
            if asked is None:
                raise not_found("Response", response_id)
            return await asyncio.to_thread(made, asked)

    @router.post("/v1/responses/{response_id}/cancel", summary="Cancel a response")
    async def cancel(response_id: str, request: Request) -> Any:
        await ended(response_id, request)
        request_id, record = await found(response_id, request)
        return whole(request_id, request, record)

    @router.delete("/v1/responses/{response_id}", summary="Cancel and forget a response")
    async def delete(response_id: str, request: Request) -> JSONResponse:
        await store.forget(await ended(response_id, request))
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    return router


# -- stored chat completions -----------------------------------------------------------------------


class _Asked(NamedTuple):
    """What a stored chat completion was asked; `size`: of its body, in bytes."""

    fields: dict[str, Any]
    metadata: dict[str, str]
    size: int

    def has(self, wanted: Mapping[str, str]) -> bool:
        """Whether its metadata are as wanted."""
        return all(self.metadata.get(name[9:-1]) == value for name, value in wanted.items())


class _Chats:
    def __init__(self, store: JournalStore) -> None:
        self._store = store

    async def asked(self, request_id: str) -> _Asked | None:
        """A chat's request; None if it is gone, or the request of another endpoint."""
        async with self._store.wholes:
            body, changed = await self._store.asked(request_id)
            if body is None:
                return None
            fields = await asyncio.to_thread(msgspec.json.decode, body)
        metadata = msgspec.json.decode(changed) if changed else fields.get("metadata")
        return _Asked(fields, metadata or {}, len(body)) if "messages" in fields else None

    async def answer(self, request_id: str, asked: _Asked) -> tuple[dict[str, Any] | None, int]:
        """The chat completion, None if it has not (yet) ended well; and its size in bytes."""
        async with self._store.wholes:
            entries = await self._store.read(request_id) or []
            fields, size = await asyncio.to_thread(chat_object, entries)
        return fields and {**fields, "metadata": asked.metadata or None}, size

    async def look(
        self, ids: Sequence[str], wanted: Mapping[str, str], model: str
    ) -> AsyncIterator[dict[str, Any] | None]:
        """Each of these chats until they are a page, None for one that is not wanted or is gone.
        `model`: of all that are wanted; empty for any.
        """
        size = 0
        for request_id in ids:
            asked, fields, answer_size = await self.asked(request_id), None, 0
            if asked is not None and asked.has(wanted):
                fields, answer_size = await self.answer(request_id, asked)
            yield fields if fields and model in ("", fields.get("model")) else None
            size += (asked.size if asked else 0) + answer_size
            if size > _PAGE_BYTES:
                return

    async def own(self, chat_id: str, request: Request) -> tuple[str, _Asked]:
        """Another tenant's chat is as unknown as one that does not exist."""
        request_id, record = await _behind(self._store, CHAT, "Chat completion", chat_id, request)
        asked = await self.asked(request_id)
        if asked is None or record.state is not State.COMPLETED:
            raise not_found("Chat completion", chat_id)
        return request_id, asked

    async def whole(self, request_id: str, asked: _Asked) -> dict[str, Any]:
        fields, _ = await self.answer(request_id, asked)
        if fields is None:
            raise not_found("Chat completion", CHAT + request_id)
        return fields


def chat_routes(
    store: JournalStore, readers: Readers, uploads: Uploads, limits: RequestLimits
) -> APIRouter:
    router, chats = APIRouter(tags=["stored chat completions"]), _Chats(store)

    @router.get(CHATS, summary="Your stored chat completions")
    @readers.endpoint
    async def list_chats(
        request: Request,
        model: _Id = "",
        order: _Order = "asc",
        after: _Id = "",
        limit: _Limit = 20,
    ) -> dict[str, Any]:
        given = request.query_params.items()
        wanted = {name: value for name, value in given if name.startswith("metadata[")}
        asked = request.state.tenant, after.removeprefix(CHAT), _LOOKED_AT + 1
        ids = await store.listed(*asked, chats=True, newest_first=order == "desc")
        if ids is None:
            raise invalid_value("after", "no such chat completion is stored (any more)")
        looks = chats.look(ids[:_LOOKED_AT], wanted, model)
        data, last, more = await wanted_page(ids, looks, limit)
        return listing(data, data[0]["id"] if data else None, last and CHAT + last, more)

    @router.get(CHATS + "/{chat_id}", summary="A stored chat completion")
    @readers.endpoint
    async def retrieve(chat_id: str, request: Request) -> dict[str, Any]:
        return await chats.whole(*await chats.own(chat_id, request))

    @router.post(CHATS + "/{chat_id}", summary="Change its metadata")
    async def update(chat_id: str, request: Request) -> Response:
        with uploads.of(request.state.tenant) as upload:
            body = await upload.body(request.headers, request.receive)
        change = read(body, limits)
        check(change, _UPDATE, limits)
        metadata = change["metadata"] or {}

        async def make() -> dict[str, Any]:
            request_id, asked = await chats.own(chat_id, request)
            await store.set_metadata(request_id, msgspec.json.encode(metadata))
            return await chats.whole(request_id, asked._replace(metadata=metadata))

        return readers.json(request, make)

    @router.delete(CHATS + "/{chat_id}", summary="Forget it")
    async def delete(chat_id: str, request: Request) -> JSONResponse:
        with readers.connections.hold(request.state.tenant):
            request_id, _ = await chats.own(chat_id, request)
        await store.forget(request_id)
        return JSONResponse({"id": chat_id, "object": "chat.completion.deleted", "deleted": True})

    @router.get(CHATS + "/{chat_id}/messages", summary="What it was asked")
    @readers.endpoint
    async def messages(
        chat_id: str,
        request: Request,
        order: _Order = "asc",
        after: _Id = "",
        limit: _Limit = 20,
    ) -> dict[str, Any]:
        _, asked = await chats.own(chat_id, request)
        named = []
        for number, message in enumerate(asked.fields["messages"]):
            name = str(message.get("id") or f"{chat_id}-{number}")
            named.append((name, {**message, "id": name}))
        return page(named, order, after, limit)

    return router
