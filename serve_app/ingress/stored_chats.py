"""Stored chat completions (`store: true`): list, retrieve, update, delete, and their messages. They
are read from the journals and bodies of their requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ValidationError
from starlette.responses import JSONResponse, Response

from serve_app.contract import CHATS, Reason, State
from serve_app.errors import RequestRefused
from serve_app.field_errors import refusal_of
from serve_app.ingress.event_streams import EventStreams
from serve_app.ingress.pages import invalid, listing, not_found, page
from serve_app.ingress.requests_api import request_behind
from serve_app.ingress.uploads import Uploads
from serve_app.ingress.validation.bodies import Metadata
from serve_app.ingress.validation.structure import NotJson, read
from serve_app.journal.entries import Entry
from serve_app.journal.events import SEPARATOR
from serve_app.journal.reader import read_whole
from serve_app.journal.store import JournalStore
from serve_app.journal.usage import Usage
from serve_app.settings.limits import RequestLimits

_PREFIX = "chatcmpl-"
_PAGE_BYTES = 8 << 20
"""A page that has reached this size ends early."""
_LOOKED_AT = 500
"""Most chats that one call looks at, however few of them are wanted."""
_Order = Literal["asc", "desc"]
_Limit = Annotated[int, Query(ge=1, le=100)]
_Id = Annotated[str, Query(max_length=200)]


class _Update(BaseModel):
    metadata: Metadata | None


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
        async with self._store.wholes:
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
        first_id = found[0]["id"] if found else None
        last_id = f"{_PREFIX}{ids[looked_at - 1]}" if looked_at else None
        return listing(found, first_id, last_id, looked_at < len(ids))


def routes(
    store: JournalStore, streams: EventStreams, uploads: Uploads, limits: RequestLimits
) -> APIRouter:
    router, chats = APIRouter(tags=["stored chat completions"]), StoredChats(store)

    def answer(request: Request, make: Callable[[], Awaitable[Any]]) -> Response:
        async def encoded() -> bytes:
            return await asyncio.to_thread(msgspec.json.encode, await make())

        return streams.json(request.state.tenant, encoded)

    async def own(chat_id: str, request: Request) -> tuple[str, _Asked]:
        """Another tenant's chat is as unknown as one that does not exist."""
        known = await request_behind(store, _PREFIX, chat_id, request.state.tenant)
        if known is None:
            raise _not_found(chat_id)
        request_id, outline = known
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
        tenant, begin = request.state.tenant, after.removeprefix(_PREFIX)
        return answer(request, partial(chats.page, tenant, wanted, order, begin, limit))

    @router.get(CHATS + "/{chat_id}", summary="A stored chat completion")
    async def retrieve(chat_id: str, request: Request) -> Response:
        async def make() -> dict[str, Any]:
            return await whole(*await own(chat_id, request))

        return answer(request, make)

    @router.post(CHATS + "/{chat_id}", summary="Change its metadata")
    async def update(chat_id: str, request: Request) -> Response:
        with uploads.of(request.state.tenant) as upload:
            body = await upload.body(request.headers, request.receive)
            metadata = _metadata_in(body, limits)

        async def make() -> dict[str, Any]:
            request_id, asked = await own(chat_id, request)
            await store.set_metadata(request_id, msgspec.json.encode(metadata))
            return await whole(request_id, asked._replace(metadata=metadata))

        return answer(request, make)

    @router.delete(CHATS + "/{chat_id}", summary="Forget it")
    async def delete(chat_id: str, request: Request) -> JSONResponse:
        with streams.connections.hold(request.state.tenant):
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
        async def make() -> dict[str, Any]:
            _, asked = await own(chat_id, request)
            named = []
            for number, message in enumerate(asked.fields["messages"]):
                name = str(message.get("id") or f"{chat_id}-{number}")
                named.append((name, {**message, "id": name}))
            return page(named, order, after, limit)

        return answer(request, make)

    return router


def _metadata_in(body: bytes, limits: RequestLimits) -> dict[str, str]:
    """The metadata that a chat completion shall have.

    Raises:
        RequestRefused: `malformed_json`, `invalid_request`.
    """
    try:
        change = read(body, limits)
        return _Update.model_validate(change).metadata or {}
    except NotJson as error:
        message = f"The body is not valid JSON: {error}."
        raise RequestRefused(Reason.MALFORMED_JSON, message) from None
    except ValidationError as error:
        raise refusal_of(error.errors(include_url=False), change) from None


def _not_found(chat_id: str) -> RequestRefused:
    return not_found("Chat completion", chat_id)


def _is_wanted(asked: _Asked, wanted: Mapping[str, str]) -> bool:
    return all(
        value == (asked.fields.get("model") if name == "model" else asked.metadata.get(name[9:-1]))
        for name, value in wanted.items()
    )


def _answer(entries: Sequence[Entry]) -> tuple[dict[str, Any] | None, int]:
    """The chat completion in a journal, None if it has none; and its size in bytes."""
    reader, answer = read_whole(entries)
    if reader.ending is None or reader.ending.state is not State.COMPLETED:
        return None, len(answer)
    if not reader.streams:
        return msgspec.json.decode(answer), len(answer)
    return {"usage": _usage(entries[-1]), **merged(answer)}, len(answer)


def _usage(last: Entry) -> dict[str, Any] | None:
    """What a stream says only if it was asked to; None if an older version has ended it."""
    if not last.used:
        return None
    used = Usage.decode(last.used)
    return {
        "prompt_tokens": used.prompt,
        "completion_tokens": used.output,
        "total_tokens": used.prompt + used.output,
    }


class _Choice:
    """One answer of a stream, in pieces: each is joined once, however many there are."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {"content": []}
        self._others: dict[str, Any] = {"role": "assistant", "refusal": None}
        self._calls: dict[int, dict[str, Any]] = {}
        self._arguments: dict[int, list[str]] = {}
        self._finish_reason: str | None = None
        self._logprobs: list[Any] = []

    def add(self, part: Mapping[str, Any]) -> None:
        for name, value in part.get("delta", {}).items():
            if name == "tool_calls":
                for call in value or ():
                    self._add_call(call)
            elif isinstance(value, str) and name != "role":
                self._texts.setdefault(name, []).append(value)
            elif value is not None:
                self._others[name] = value
        self._finish_reason = part.get("finish_reason") or self._finish_reason
        self._logprobs += (part.get("logprobs") or {}).get("content") or ()

    def _add_call(self, part: Mapping[str, Any]) -> None:
        index, function = part.get("index", 0), part.get("function") or {}
        call = self._calls.setdefault(index, {"id": None, "name": ""})
        call["id"] = part.get("id") or call["id"]
        call["name"] += function.get("name") or ""
        self._arguments.setdefault(index, []).append(function.get("arguments") or "")

    def joined(self, index: int) -> dict[str, Any]:
        texts = {name: "".join(pieces) if pieces else None for name, pieces in self._texts.items()}
        message = {**self._others, **texts}
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {
                        "name": call["name"],
                        "arguments": "".join(self._arguments[number]),
                    },
                }
                for number, call in sorted(self._calls.items())
            ]
        logprobs = {"content": self._logprobs} if self._logprobs else None
        return {
            "index": index,
            "message": message,
            "finish_reason": self._finish_reason,
            "logprobs": logprobs,
        }


def merged(events: bytes) -> dict[str, Any]:
    """The chat completion that the chunks of a stream make."""
    whole: dict[str, Any] = {}
    choices: dict[int, _Choice] = {}
    for event in events.split(SEPARATOR):
        data = event.partition(b"data: ")[2]
        if not data or data.startswith(b"[DONE]"):
            continue
        chunk = msgspec.json.decode(data)
        for part in chunk.pop("choices", ()):
            choices.setdefault(part.get("index", 0), _Choice()).add(part)
        whole.update({name: value for name, value in chunk.items() if value is not None})
    joined = [choice.joined(index) for index, choice in sorted(choices.items())]
    return {**whole, "object": "chat.completion", "choices": joined}
