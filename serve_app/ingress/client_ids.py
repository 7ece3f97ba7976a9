"""Tells a client's `x-request-id` from the one that Ray Serve makes up for requests without one."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

_MAX_CHARS = 128
_MADE_UP = f"serve-{secrets.token_hex(8)}-"
"""Prefix of made-up ids. No client can know it, because it never leaves the process."""


def make_up() -> str:
    """Create the id under which Serve logs a request without an id, so that it can be told from a
    client's.
    """
    return _MADE_UP + secrets.token_hex(8)


def client_request_id(headers: Mapping[str, str]) -> str:
    """The client's own id for its request; empty if it sent none."""
    found = headers.get("x-request-id", "")
    return "" if found.startswith(_MADE_UP) else found[:_MAX_CHARS]
