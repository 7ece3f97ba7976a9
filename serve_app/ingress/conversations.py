"""Responses that go on from an earlier one (`previous_response_id`): the earlier input and answer
are read from its journal and put before the new input. So the body of every response holds all that
an engine needs, and any replica continues it after any kill.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from serve_app.contract import Reason, State
from serve_app.errors import RequestRefused
from serve_app.journal.entries import Entry
from serve_app.journal.events import SEPARATOR
from serve_app.journal.reader import JournalReader, read_whole
from serve_app.journal.store import JournalStore

PREFIX = "resp_"
"""Behind it, the id of a response is its request's."""
PARAM = "previous_response_id"
Fields = dict[str, msgspec.Raw]
"""What a response has in its fields may be large, and is passed on as it is."""

_fields = msgspec.json.Decoder(Fields)
_input = msgspec.json.Decoder(str | list[msgspec.Raw])
_items = msgspec.json.Decoder(list[msgspec.Raw])


class Conversations:
    """Puts what came before into requests."""

    def __init__(self, store: JournalStore, max_body_bytes: int) -> None:
        self._store = store
        self._max_body_bytes = max_body_bytes

    async def whole(self, tenant: str, body: bytes, request: Mapping[str, Any]) -> bytes:
        """The body with the items of the earlier responses before its own.

        Raises:
            RequestRefused: `previous_response_not_found`; `invalid_request` if the earlier one has
                no answer; `body_too_large`.
            RedisUnavailable: Redis cannot be reached.
        """
        previous = str(request[PARAM])
        request_id = previous.removeprefix(PREFIX)
        if request_id == previous:
            raise _not_found(previous)
        async with self._store.wholes:
            entries, asked = await self._store.whole(request_id)
            made = await asyncio.to_thread(_joined, previous, tenant, entries, asked, body)
        if len(made) > self._max_body_bytes:
            raise RequestRefused(
                Reason.BODY_TOO_LARGE,
                f"With the responses before it, the request has {len(made):,} bytes; at most "
                f"{self._max_body_bytes:,} are taken.",
                param=PARAM,
            )
        return made


def _joined(
    previous: str, tenant: str, entries: Sequence[Entry], asked: bytes | None, body: bytes
) -> bytes:
    """Another tenant's response is as unknown as one that does not exist."""
    reader, fields = answer(entries)
    if reader.facts is None or reader.facts.tenant != tenant or asked is None:
        raise _not_found(previous)
    if reader.ending is None:
        raise _no_answer(previous, "has not ended yet")
    if reader.ending.state is not State.COMPLETED:
        raise _no_answer(previous, f"was {reader.ending.state}")
    if fields is None:
        raise _not_found(previous)
    request = _fields.decode(body)
    items = [*items_of(asked), *_items.decode(fields["output"]), *items_of(body)]
    return msgspec.json.encode({**request, "input": items})


def items_of(body: bytes) -> list[msgspec.Raw]:
    """The items of a request's input; a text is a message."""
    given = _input.decode(_fields.decode(body)["input"])
    if isinstance(given, list):
        return given
    content = [{"type": "input_text", "text": given}]
    item = {"type": "message", "role": "user", "content": content}
    return [msgspec.Raw(msgspec.json.encode(item))]


def answer(entries: Sequence[Entry]) -> tuple[JournalReader, Fields | None]:
    """What a reader of a whole journal knows, and the response in it; None if there is none, or it
    is the journal of another endpoint.
    """
    reader, body = read_whole(entries)
    try:
        if reader.streams:  # its last event holds it
            event = body.rstrip().rpartition(SEPARATOR)[2]
            body = _fields.decode(event.partition(b"data: ")[2])["response"]
        fields = _fields.decode(body)
    except (msgspec.MsgspecError, LookupError):
        fields = {}
    return reader, fields if bytes(fields.get("object", b"")) == b'"response"' else None


def _not_found(previous: str) -> RequestRefused:
    message = f"Previous response with id '{previous[:80]}' not found."
    return RequestRefused(Reason.PREVIOUS_RESPONSE_NOT_FOUND, message, param=PARAM)


def _no_answer(previous: str, why: str) -> RequestRefused:
    message = f"The response '{previous[:80]}' {why}, so nothing can go on from it."
    return RequestRefused(Reason.INVALID_REQUEST, message, param=PARAM)
