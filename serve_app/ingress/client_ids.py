"""Tells a client's `x-request-id` from the one that Ray Serve makes up for requests without one."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from contextvars import ContextVar

_MAX_CHARS = 128
_made_up: ContextVar[str] = ContextVar("made_up", default="")
"""The id of the request that this task serves, if it was made up. It leaves the process in logs and
in answers, and no client gains anything by sending it.
"""


def make_up() -> str:
    """Create the id under which Serve logs a request without an id."""
    made = str(uuid.uuid4())
    _made_up.set(made)
    return made


def client_request_id(headers: Mapping[str, str]) -> str:
    """The client's own id for its request; empty if it sent none."""
    found = headers.get("x-request-id", "")
    return "" if found == _made_up.get() else found[:_MAX_CHARS]
