"""Lists in OpenAI's form, a page at a time; and the answer to an id that is unknown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve_app.contract import Reason
from serve_app.errors import RequestRefused


def listing(
    data: Sequence[Any], first_id: str | None, last_id: str | None, more: bool
) -> dict[str, Any]:
    return {
        "object": "list",
        "data": data,
        "first_id": first_id,
        "last_id": last_id,
        "has_more": more,
    }


def page(items: Sequence[tuple[str, Any]], order: str, after: str, limit: int) -> dict[str, Any]:
    """A page of items with their ids; `order`: `asc`, as they are given, or `desc`.

    Raises:
        RequestRefused: `invalid_request`, if `after` is none of the ids.
    """
    if order == "desc":
        items = items[::-1]
    ids = [name for name, _ in items]
    if after and after not in ids:
        raise invalid("after", f"there is no item '{after[:80]}'")
    begin = ids.index(after) + 1 if after else 0
    shown = items[begin : begin + limit]
    first, last = (shown[0][0], shown[-1][0]) if shown else (None, None)
    return listing([item for _, item in shown], first, last, begin + limit < len(ids))


def invalid(param: str, why: str) -> RequestRefused:
    message = f"Invalid value for '{param}': {why}."
    return RequestRefused(Reason.INVALID_REQUEST, message, param=param)


def not_found(what: str, name: str) -> RequestRefused:
    message = f"{what} with id '{name[:80]}' not found."
    return RequestRefused(Reason.NOT_FOUND, message, param="id")
