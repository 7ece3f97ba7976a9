"""The JSON in entries: about a request, an attempt, an ending and a response. Pure."""

from __future__ import annotations

import msgspec


class RequestLine(msgspec.Struct, frozen=True):
    """The HTTP request without its body, with only the headers that the engine's server needs."""

    method: str
    path: str
    query: str
    headers: list[tuple[str, str]]


class RequestFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was decided about a request when it was admitted. Times are Unix milliseconds."""

    request_class: str
    tenant: str
    session: str
    model: str
    streamed: bool
    admitted_ms: int
    deadline_ms: int
    wake: str
    client_request_id: str = ""
    idempotency: str = ""
    """Digest of path and body, if the client sent an `Idempotency-Key`."""
    idempotency_value: str = ""
    """The same of what the body means, however it is written."""
    trace: str = ""
    """The `traceparent` of the HTTP request, if it is traced."""
    key: str = ""
    """The name of the API key that it came with; empty if none is required."""
    detached: bool = False
    """Whether it goes on without a reader."""
    retention_s: float = 0.0
    """How long its answer is kept for whoever comes later; 0 if it is not."""
    body_bytes: int = 0
    """Size of its body, if that is kept as long as the answer; otherwise 0."""

    @property
    def stored(self) -> bool:
        """Whether its body is kept as long as the answer."""
        return self.body_bytes > 0

    @property
    def kept(self) -> bool:
        """Whether its answer is kept for whoever comes later."""
        return self.retention_s > 0


class AttemptFacts(msgspec.Struct, frozen=True):
    """Which worker works on the request, and since when."""

    replica: str
    engine: str
    opened_ms: int
    cause: str = ""
    """The `Cause` for which the dispatcher gave up the previous attempt; empty for the first. A
    newer version may write a word that this version does not know.
    """
    fingerprint: str = ""
    """Of model, weights and engine; only an equal one can continue the response."""


class Summary(msgspec.Struct, frozen=True):
    """What is known of a request whose entries are trimmed. Times are Unix milliseconds."""

    request: RequestFacts | None
    attempt: AttemptFacts | None
    attempts: int
    ended_ms: int
    first_output_ms: int | None = None
    output_tokens: int = 0
    """What version 0.2 has counted; later ones write `Usage` into the entry."""
    began_ms: int = 0
    """When the first attempt was opened; 0 if none was."""
    why: str = ""
    """Why an answer could not be continued; completes a sentence that ends with "because"."""
    message: str = ""
    """What the caller is told of a failure; empty if that is what its reason says."""


class Head(msgspec.Struct, frozen=True):
    """Status and headers of the engine's response."""

    status: int
    headers: list[tuple[str, str]]
    logprobs_of_text: bool = False
    """Whether it has log probabilities of its text alone, and not of every token as before."""

    @property
    def streamed(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        return any(
            k == "content-type" and v.startswith("text/event-stream") for k, v in self.headers
        )
