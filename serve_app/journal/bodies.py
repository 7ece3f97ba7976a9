"""A request's body: in a key of its own, so that whoever asks for a state does not read it. Pure.

Key `{ns}:b:<request_id>`: written with entry 0-1, in one transaction and with the same expiry; read by the worker that
opens an attempt; removed with the request's end. In journals of versions before 0.2 it stands in 0-1 itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.journal.entries import REQUEST_ID, Entry

_BODY = b"b"
_LARGE = (b"b", b"o", b"z", b"f")  # `f` only makes sense with `b`


def body_key(namespace: str, request_id: str) -> str:
    """Redis key of a request's body."""
    return f"{namespace}:b:{request_id}"


def with_body(entries: Sequence[Entry], body: bytes | None) -> list[Entry]:
    """A journal with the body in the request's entry again, unless it stands there; None: its key is gone."""
    if not entries or entries[0].id != REQUEST_ID or _BODY in entries[0].fields or body is None:
        return list(entries)
    first = entries[0]._replace(fields={**entries[0].fields, _BODY: body})
    return [first, *entries[1:]]


def has_body(request: Entry) -> bool:
    """Whether the body of entry 0-1 is there; an empty one is."""
    return _BODY in request.fields


def without_bytes(entry: Entry) -> Entry:
    """What an entry says of the request's state: neither its body nor what was answered."""
    return entry._replace(fields={name: value for name, value in entry.fields.items() if name not in _LARGE})
