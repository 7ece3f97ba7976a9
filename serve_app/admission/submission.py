"""The input and the result of admission."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from serve_app.journal.facts import RequestFacts, RequestLine
from serve_app.policy.work import Work


class Submission(NamedTuple):
    """A validated request to be accepted, whatever its source.

    Args:
        facts: what is decided about it so far.
        line: method, path, query and headers for the engine's server.
        body: as the client sent it.
        work: the tokens that it reads, and the most that it may write.
        idempotency_key: a tenant's submissions with the same key are one request; empty if this is
            a request of its own.
        value: the body's meaning as bytes, for comparison under that key; empty if it is not known.
        seen: the number of the last event that the client has of the answer to its key; if it has
            any, only an earlier request will do.
        if_there_is_room: whether it is accepted, and not kept, where too much is kept already.
    """

    facts: RequestFacts
    line: RequestLine
    body: bytes
    work: Work
    idempotency_key: str
    value: bytes
    seen: int
    if_there_is_room: bool


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
