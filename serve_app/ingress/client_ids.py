"""Whose word an `x-request-id` is: the client's, or Ray Serve's, which makes one up for those who send none."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

_MAX_CHARS = 128
_MADE_UP = f"serve-{secrets.token_hex(8)}-"
"""No client can know it: it leaves no process."""


def make_up() -> str:
    """What Serve is to call a request without an id, in its own logs, so that it can be told from a client's."""
    return _MADE_UP + secrets.token_hex(8)


def client_request_id(headers: Mapping[str, str]) -> str:
    """What the client calls its request; empty where it did not say."""
    found = headers.get("x-request-id", "")
    return "" if found.startswith(_MADE_UP) else found[:_MAX_CHARS]
