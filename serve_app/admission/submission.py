"""The input and the result of admission."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from serve_app.journal.facts import RequestFacts, RequestLine
from serve_app.policy.work import Work


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request to be accepted, whatever its source.

    Args:
        tenant: whose request it is.
        line: method, path, query and headers for the engine's server.
        body: as the client sent it.
        model: the model that should answer.
        request_class: one of `CLASSES`.
        session: the affinity key, see `session_key`.
        timeout_s: seconds from the admission to the deadline.
        work: the tokens that it reads, and the most that it may write.
        streamed: whether the answer is streamed.
        wake: the channel on which the submitter learns of new journal entries; empty if nobody
            listens.
        client_request_id: the client's name for the request; empty if it gave none.
        idempotency_key: a tenant's submissions with the same key are one request; empty if this is
            a request of its own.
        value: the body's meaning as bytes, for comparison under that key; empty if it is not known.
        seen: the number of the last event that the client has of the answer to its key; if it has
            any, only an earlier request will do.
        trace: the `traceparent` of the request's span; empty if it is not traced.
        key: the name of the API key; empty if none is required.
        detached: whether the request goes on although nobody waits for it.
        retention_s: how long the answer is kept for whoever comes later; 0 for all others.
        stored: whether the body is kept as long as the answer.
        if_there_is_room: whether it is accepted, and not kept, where too much is kept already.
    """

    tenant: str
    line: RequestLine
    body: bytes
    model: str
    request_class: str
    session: str
    timeout_s: float
    work: Work
    streamed: bool = False
    wake: str = ""
    client_request_id: str = ""
    idempotency_key: str = ""
    value: bytes = b""
    seen: int = 0
    trace: str = ""
    key: str = ""
    detached: bool = False
    retention_s: float = 0.0
    stored: bool = False
    if_there_is_room: bool = False


class Receipt(NamedTuple):
    """The accepted request.

    Args:
        request_id: the name of its journal.
        facts: what was decided about it.
        begun: call it when a worker has started the request, or when none will. Until then the
            request counts against the limits on waiting requests.
        repeat: whether the request was accepted earlier, under the same idempotency key.
        ended: whether a repeated request has ended already.
    """

    request_id: str
    facts: RequestFacts
    begun: Callable[[], None]
    repeat: bool = False
    ended: bool = False


Expect = Callable[[str], Callable[[], None]]
"""Called with a request's id right before the request is written, so that a submitter who follows
the journal misses nothing. Returns a function that undoes this; it is called if the request was not
accepted or if that is unknown. If another repeat was faster, `expect` may be called again with
another id.
"""
