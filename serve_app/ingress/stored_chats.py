"""Stored chat completions (`store: true`): list, retrieve, update, delete, and their messages. They
are read from the journals and bodies of their requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from serve_app.contract import CHATS, Reason, State
from serve_app.errors import RequestRefused
from serve_app.ingress.event_streams import EventStreams
from serve_app.ingress.requests_api import entries_of, invalid
from serve_app.journal.entries import Entry
from serve_app.journal.events import SEPARATOR
from serve_app.journal.reader import JournalReader
from serve_app.journal.store import JournalStore

_PREFIX = "chatcmpl-"
_PAGE_BYTES = 8 << 20
"""A page that has reached this size ends early."""
_LOOKED_AT = 500
"""Most chats that one call looks at, however few of them are wanted."""
_Order = Literal["asc", "desc"]
_Limit = Annotated[int, Query(ge=1, le=100)]
_Id = Annotated[str, Query(max_length=200)]


class _Update(BaseModel):
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None


class _Chat(NamedTuple):
    """A stored chat completion; `size`: of what was read for it, in bytes."""

    fields: dict[str, Any]
    messages: list[Any]
    size: int


class StoredChats:
    """Reads what is stored."""

    def __init__(self, store: JournalStore) -> None:
        self._store = store

    async def one(self, request_id: str) -> _Chat | None:
        """A chat completion; None if it has not (yet) ended well, or is gone, or none.

        Raises:
            RedisUnavailable: Redis cannot be reached.
        """
        entries = await self._store.read(request_id)
        body, metadata = await self._store.asked(request_id)
        if not entries or body is None:
            return None
        return await asyncio.to_thread(_read, entries, body, metadata)

    async def page(
        self, tenant: str, wanted: Mapping[str, str], order: _Order, after: str, limit: int
    ) -> dict[str, Any]:
        """A page of those whose model and metadata are as wanted."""
        found: list[dict[str, Any]] = []
        size = looked_at = 0
        ids = await self._store.stored_chats(tenant, after, order == "desc", _LOOKED_AT + 1)
        if ids is None:
            raise invalid("after", "no such chat completion is stored (any more)")
        for request_id in ids[:_LOOKED_AT]:
            if len(found) == limit or size > _PAGE_BYTES:
                break
            looked_at += 1
            chat = await self.one(request_id)
            if chat is not None and _is_wanted(chat, wanted):
                found.append(chat.fields)
                size += chat.size
        return _list(found, looked_at < len(ids))


def routes(store: JournalStore, streams: EventStreams) -> APIRouter:
    """The endpoints."""
    router, chats = APIRouter(tags=["stored chat completions"]), StoredChats(store)

    async def own(chat_id: str, request: Request) -> tuple[str, _Chat]:
        """Another tenant's chat is as unknown as one that does not exist."""
        request_id = chat_id.removeprefix(_PREFIX)
        if request_id == chat_id:
            raise _not_found(chat_id)
        try:
            await entries_of(store, request_id, request.state.tenant)
        except RequestRefused:
            raise _not_found(chat_id) from None
        chat = await chats.one(request_id)
        if chat is None:
            raise _not_found(chat_id)
        return request_id, chat

    @router.get(CHATS, summary="Your stored chat completions")
    async def list_chats(
        request: Request,
        model: _Id = "",
        order: _Order = "asc",
        after: _Id = "",
        limit: _Limit = 20,
    ) -> Response:
        given = request.query_params.items()
        wanted = {name: value for name, value in given if name.startswith("metadata[")}
        wanted |= {"model": model} if model else {}
        with streams.connections.hold(request.state.tenant):
            page = await chats.page(
                request.state.tenant, wanted, order, after.removeprefix(_PREFIX), limit
            )
        return _json(page)

    @router.get(CHATS + "/{chat_id}", summary="A stored chat completion")
    async def retrieve(chat_id: str, request: Request) -> Response:
        with streams.connections.hold(request.state.tenant):
            _, chat = await own(chat_id, request)
        return _json(chat.fields)

    @router.post(CHATS + "/{chat_id}", summary="Change its metadata")
    async def update(chat_id: str, request: Request, change: _Update) -> Response:
        request_id, chat = await own(chat_id, request)
        await store.set_metadata(request_id, msgspec.json.encode(change.metadata))
        return _json({**chat.fields, "metadata": change.metadata})

    @router.delete(CHATS + "/{chat_id}", summary="Forget it")
    async def delete(chat_id: str, request: Request) -> JSONResponse:
        request_id, _ = await own(chat_id, request)
        await store.forget(request_id)
        return JSONResponse({"id": chat_id, "object": "chat.completion.deleted", "deleted": True})

    @router.get(CHATS + "/{chat_id}/messages", summary="What it was asked")
    async def messages(
        chat_id: str,
        request: Request,
        order: _Order = "asc",
        after: _Id = "",
        limit: _Limit = 20,
    ) -> Response:
        _, chat = await own(chat_id, request)
        named = [{"id": f"{chat_id}-{n}", **one} for n, one in enumerate(chat.messages)]
        named = named[::-1] if order == "desc" else named
        ids = [one["id"] for one in named]
        if after and after not in ids:
            raise invalid("after", "the chat completion has no such message")
        begin = ids.index(after) + 1 if after else 0
        return _json(_list(named[begin : begin + limit], begin + limit < len(ids)))

    return router


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def _list(data: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": more,
    }


def _not_found(chat_id: str) -> RequestRefused:
    message = f"Chat completion with id '{chat_id[:80]}' not found."
    return RequestRefused(Reason.NOT_FOUND, message, param="id")


def _is_wanted(chat: _Chat, wanted: Mapping[str, str]) -> bool:
    metadata = chat.fields["metadata"] or {}
    return all(
        value == (chat.fields["model"] if name == "model" else metadata.get(name[9:-1]))
        for name, value in wanted.items()
    )


def _read(entries: Sequence[Entry], body: bytes, changed: bytes | None) -> _Chat | None:
    reader, parts = JournalReader(), []
    for entry in entries:
        reader.feed(entry)
    while reader.more:
        parts.append(reader.take())
    if reader.ending is None or reader.ending.state is not State.COMPLETED:
        return None
    answer, asked = b"".join(parts), msgspec.json.decode(body)
    if "messages" not in asked:  # the request of another endpoint
        return None
    fields = merged(answer) if reader.streams else msgspec.json.decode(answer)
    metadata = msgspec.json.decode(changed) if changed else asked.get("metadata")
    return _Chat({**fields, "metadata": metadata}, asked["messages"], len(answer) + len(body))


def merged(events: bytes) -> dict[str, Any]:
    """The chat completion that the chunks of a stream make."""
    whole: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for event in events.split(SEPARATOR):
        data = event.partition(b"data: ")[2]
        if not data or data.startswith(b"[DONE]"):
            continue
        chunk = msgspec.json.decode(data)
        for choice in chunk.pop("choices", ()):
            _add_choice(choices, choice)
        whole.update({name: value for name, value in chunk.items() if value is not None})
    return {**whole, "object": "chat.completion", "choices": [choices[n] for n in sorted(choices)]}


def _add_choice(choices: dict[int, dict[str, Any]], part: Mapping[str, Any]) -> None:
    index = part.get("index", 0)
    choice = choices.setdefault(
        index,
        {
            "index": index,
            "message": {"role": "assistant", "content": None, "refusal": None},
            "finish_reason": None,
            "logprobs": None,
        },
    )
    message = choice["message"]
    for name, value in part.get("delta", {}).items():
        if name == "tool_calls":
            for call in value or ():
                _add_call(message.setdefault("tool_calls", []), call)
        elif isinstance(value, str) and name != "role":
            message[name] = (message.get(name) or "") + value
        elif value is not None:
            message[name] = value
    choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
    if (logprobs := part.get("logprobs")) and logprobs.get("content"):
        choice["logprobs"] = choice["logprobs"] or {"content": []}
        choice["logprobs"]["content"] += logprobs["content"]


def _add_call(calls: list[dict[str, Any]], part: Mapping[str, Any]) -> None:
    index = part.get("index", 0)
    while len(calls) <= index:
        calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
    call, function = calls[index], part.get("function") or {}
    call["id"] = part.get("id") or call["id"]
    for name in ("name", "arguments"):
        call["function"][name] += function.get(name) or ""
