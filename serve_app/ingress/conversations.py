"""Responses that go on from earlier ones: by `previous_response_id`, whose input and answer are
read from its journal and put before the new input, or by the ids of items (`item_reference`), which
the items replace. So the body of every response holds all that an engine needs, and any replica
continues it after any kill.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from serve_app.contract import Reason, State, request_of_item
from serve_app.errors import RedisUnavailable, RequestRefused
from serve_app.ingress.objects import RESPONSE, fields_of, input_items, not_found, response_in
from serve_app.journal.entries import Entry
from serve_app.requests.store import JournalStore

_PARAM = "previous_response_id"
_MOST_RESPONSES = 128
"""Of whose items one input may have references: each is read whole."""


class _Item(msgspec.Struct):
    id: str | None = None


_of_item = msgspec.json.Decoder(_Item)
_items = msgspec.json.Decoder(list[msgspec.Raw])
T = TypeVar("T")


@dataclass(eq=False)
class Conversations:
    """Puts what came before into requests. `within_s`: how long Redis may take to give one earlier
    response.
    """

    store: JournalStore
    max_body_bytes: int
    within_s: float

    async def whole(self, tenant: str, body: bytes, request: Mapping[str, Any]) -> bytes:
        """The body of a request that goes on, with the items of the earlier responses.

        Raises:
            RequestRefused: `previous_response_not_found`; `not_found` for an item;
                `invalid_request` if the earlier one has no answer; `body_too_large`.
            RedisUnavailable: Redis cannot be reached.
        """
        if names := _named(request):
            body = await self._with_items(tenant, body, names)
        if not request.get(_PARAM):
            return body
        previous = str(request[_PARAM])
        request_id = previous.removeprefix(RESPONSE)
        if request_id == previous:
            raise _not_found(previous)
        async with self.store.wholes:
            entries, asked = await self._in_time(self.store.whole(request_id))
            made = await asyncio.to_thread(_joined, previous, tenant, entries, asked, body)
        self._check_size(len(made), _PARAM)
        return made

    async def _with_items(self, tenant: str, body: bytes, names: Mapping[int, str]) -> bytes:
        """The body with earlier items at these places, by their ids. The items of one response at a
        time are read, and only what is referred to is kept.
        """
        items, size = await asyncio.to_thread(input_items, body), len(body)
        owners = {name: request_of_item(name) or "" for name in names.values()}
        if len(set(owners.values())) > _MOST_RESPONSES:
            message = f"'input' may refer to items of at most {_MOST_RESPONSES} responses."
            raise RequestRefused(Reason.INVALID_REQUEST, message, param="input")
        for owner in dict.fromkeys(owners.values()):
            wanted = {place: name for place, name in names.items() if owners[name] == owner}
            found: dict[str, msgspec.Raw] = {}
            if owner:
                async with self.store.wholes:
                    entries = await self._in_time(self.store.read(owner)) or []
                    its = tenant, entries, set(wanted.values())
                    found = await asyncio.to_thread(_output, *its)
            for place, name in wanted.items():
                if name not in found:
                    raise not_found("Item", name, "input")
                size += len(bytes(found[name]))
                self._check_size(size, "input")
                items[place] = found[name]
        return await asyncio.to_thread(_with_input, body, items)

    async def _in_time(self, reading: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self.within_s):
                return await reading
        except TimeoutError:
            raise RedisUnavailable(f"Redis: no answer in {self.within_s:g} s") from None

    def _check_size(self, size: int, param: str) -> None:
        if size > self.max_body_bytes:
            raise RequestRefused(
                Reason.BODY_TOO_LARGE,
                f"With the responses before it, the request has {size:,} bytes; at most "
                f"{self.max_body_bytes:,} are taken.",
                param=param,
            )


def goes_on(request: Mapping[str, Any]) -> bool:
    """Whether a request names something of earlier responses."""
    return bool(request.get(_PARAM) or _named(request))


def _named(request: Mapping[str, Any]) -> dict[int, str]:
    """The ids of earlier items in the input, by their places."""
    given = request["input"]
    return {
        place: str(item["id"])
        for place, item in enumerate(given if isinstance(given, list) else ())
        if isinstance(item, dict)
        and "id" in item
        and item.keys() <= {"id", "type"}
        and item.get("type") in (None, "item_reference")
    }


def _output(tenant: str, entries: Sequence[Entry], names: set[str]) -> dict[str, msgspec.Raw]:
    """Some items of a stored response, by their ids; none of another tenant's."""
    reader, fields = response_in(entries)
    facts, ending = reader.facts, reader.ending
    if facts is None or facts.tenant != tenant or not facts.stored or fields is None:
        return {}
    if ending is None or ending.state is not State.COMPLETED:
        return {}
    items = ((_of_item.decode(item).id, item) for item in _items.decode(fields["output"]))
    return {name: item.copy() for name, item in items if name and name in names}


def _joined(
    previous: str, tenant: str, entries: Sequence[Entry], asked: bytes | None, body: bytes
) -> bytes:
    """Another tenant's response is as unknown as one that does not exist."""
    reader, fields = response_in(entries)
    state = reader.ending.state if reader.ending is not None else None
    known = reader.facts is not None and reader.facts.tenant == tenant and asked is not None
    if known and state is not State.COMPLETED:
        why = f"was {state}" if state else "has not ended yet"
        message = f"The response '{previous[:80]}' {why}, so nothing can go on from it."
        raise RequestRefused(Reason.INVALID_REQUEST, message, param=_PARAM)
    if not known or asked is None or fields is None:
        raise _not_found(previous)
    items = [*input_items(asked), *_items.decode(fields["output"]), *input_items(body)]
    return _with_input(body, items)


def _with_input(body: bytes, items: list[msgspec.Raw]) -> bytes:
    return msgspec.json.encode({**fields_of(body), "input": items})


def _not_found(previous: str) -> RequestRefused:
    reason = Reason.PREVIOUS_RESPONSE_NOT_FOUND
    return not_found("Previous response", previous, _PARAM, reason)
