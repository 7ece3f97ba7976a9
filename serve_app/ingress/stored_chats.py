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


class _Asked(NamedTuple):
    """What a stored chat completion was asked; `size`: of its body, in bytes."""

    fields: dict[str, Any]
    metadata: dict[str, str]
    size: int


class StoredChats:
    """Reads what is stored."""

    def __init__(self, store: JournalStore) -> None:
        self._store = store

    async def asked(self, request_id: str) -> _Asked | None:
        """A chat's request; None if it is gone, or the request of another endpoint.

        Raises:
            RedisUnavailable: Redis cannot be reached.
        """
        body, changed = await self._store.asked(request_id)
        if body is None:
            return None
        fields = await asyncio.to_thread(msgspec.json.decode, body)
        metadata = msgspec.json.decode(changed) if changed else fields.get("metadata")
        return _Asked(fields, metadata or {}, len(body)) if "messages" in fields else None

    async def answer(self, request_id: str, asked: _Asked) -> tuple[dict[str, Any] | None, int]:
        """The chat completion, None if it has not (yet) ended well; and its size in bytes.

        Raises:
            RedisUnavailable: Redis cannot be reached.
        """
        async with self._store.wholes:
            entries = await self._store.read(request_id) or []
            fields, size = await asyncio.to_thread(_answer, entries)
        return fields and {**fields, "metadata": asked.metadata or None}, size

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
            asked = await self.asked(request_id)
            size += asked.size if asked else 0
            if asked is None or not _is_wanted(asked, wanted):
                continue
            fields, answer_size = await self.answer(request_id, asked)
            size += answer_size
            found += [fields] if fields else []
        return _list(found, looked_at < len(ids), last=ids[looked_at - 1] if looked_at else "")


def routes(store: JournalStore, streams: EventStreams) -> APIRouter:
    """The endpoints."""
    router, chats = APIRouter(tags=["stored chat completions"]), StoredChats(store)

    async def own(chat_id: str, request: Request) -> tuple[str, _Asked]:
        """Another tenant's chat is as unknown as one that does not exist."""
        request_id = chat_id.removeprefix(_PREFIX)
        if request_id == chat_id:
            raise _not_found(chat_id)
        try:
            outline = await entries_of(store, request_id, request.state.tenant)
        except RequestRefused:
            raise _not_found(chat_id) from None
        asked = await chats.asked(request_id)
        completed = any(entry.state is State.COMPLETED for entry in outline)
        if asked is None or not completed:
            raise _not_found(chat_id)
        return request_id, asked

    async def whole(request_id: str, asked: _Asked) -> dict[str, Any]:
        fields, _ = await chats.answer(request_id, asked)
        if fields is None:
            raise _not_found(_PREFIX + request_id)
        return fields

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
            return _json(await whole(*await own(chat_id, request)))

    @router.post(CHATS + "/{chat_id}", summary="Change its metadata")
    async def update(chat_id: str, request: Request, change: _Update) -> Response:
        with streams.connections.hold(request.state.tenant):
            request_id, asked = await own(chat_id, request)
            await store.set_metadata(request_id, msgspec.json.encode(change.metadata))
            return _json({**await whole(request_id, asked), "metadata": change.metadata})

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
        with streams.connections.hold(request.state.tenant):
            _, asked = await own(chat_id, request)
        named = [{"id": f"{chat_id}-{n}", **one} for n, one in enumerate(asked.fields["messages"])]
        named = named[::-1] if order == "desc" else named
        ids = [one["id"] for one in named]
        if after and after not in ids:
            raise invalid("after", "the chat completion has no such message")
        begin = ids.index(after) + 1 if after else 0
        return _json(_list(named[begin : begin + limit], begin + limit < len(ids)))

    return router


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def _list(data: list[dict[str, Any]], more: bool, last: str = "") -> dict[str, Any]:
    """A page in OpenAI's form. `last`: the request of the last one that was looked at, where the
    next page begins; empty if that is the last one shown.
    """
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": f"{_PREFIX}{last}" if last else data[-1]["id"] if data else None,
        "has_more": more,
    }


def _not_found(chat_id: str) -> RequestRefused:
    message = f"Chat completion with id '{chat_id[:80]}' not found."
    return RequestRefused(Reason.NOT_FOUND, message, param="id")


def _is_wanted(asked: _Asked, wanted: Mapping[str, str]) -> bool:
    return all(
        value == (asked.fields.get("model") if name == "model" else asked.metadata.get(name[9:-1]))
        for name, value in wanted.items()
    )


def _answer(entries: Sequence[Entry]) -> tuple[dict[str, Any] | None, int]:
    """The chat completion in a journal, None if it has none; and its size in bytes."""
    reader, parts = JournalReader(), []
    for entry in entries:
        reader.feed(entry)
    while reader.more:
        parts.append(reader.take())
    answer = b"".join(parts)
    if reader.ending is None or reader.ending.state is not State.COMPLETED:
        return None, len(answer)
    return merged(answer) if reader.streams else msgspec.json.decode(answer), len(answer)


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
