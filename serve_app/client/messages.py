"""The requests that the transports send, and what the responses to them mean."""

from __future__ import annotations

import json
import uuid
from contextlib import suppress
from urllib.parse import quote

import httpx

# Headers of the first request that do not apply to the GET for the rest; Ray's proxy would enforce
# the timeout with a 408.
_OF_THE_FIRST = (
    "accept",
    "content-",
    "expect",
    "idempotency-",
    "last-event-id",
    "prefer",
    "transfer-",
    "x-request-timeout-",
)


def is_repeatable(request: httpx.Request) -> bool:
    """Whether it may be sent again: a POST by its key, and a GET of a request's events."""
    path = request.url.path
    if request.method == "GET":
        return "/v1/requests/" in path and path.endswith("/events")
    return request.method == "POST" and "/v1/" in path


def repeatable(request: httpx.Request) -> httpx.Request:
    """Such a request, whose body has been read; a POST with an `Idempotency-Key`: the caller's or a
    new one.
    """
    headers = request.headers.copy()
    if request.method == "POST":
        headers.setdefault("idempotency-key", str(uuid.uuid4()))
    headers["accept-encoding"] = (
        "identity"  # two halves of compressed streams do not form one stream
    )
    return httpx.Request(
        request.method,
        request.url,
        headers=headers,
        stream=request.stream,
        extensions=request.extensions,
    )


def seen_before(request: httpx.Request) -> int:
    """The number of the last event that the caller has already, or 0."""
    seen = request.headers.get("last-event-id", "")
    return int(seen) if seen.isdecimal() else 0


def rest_of(first: httpx.Request, request_id: str, last: int) -> httpx.Request:
    """The GET for the events after number `last` of the answer to the first request."""
    headers = [
        item for item in first.headers.multi_items() if not item[0].startswith(_OF_THE_FIRST)
    ]
    headers += [
        ("accept", "text/event-stream"),
        ("accept-encoding", "identity"),
        ("last-event-id", str(last)),
    ]
    before = first.url.raw_path.partition(b"?")[0].rpartition(b"/v1/")[0]
    url = first.url.copy_with(
        raw_path=before + f"/v1/requests/{quote(request_id, safe='')}/events".encode()
    )
    return httpx.Request("GET", url, headers=headers, extensions=first.extensions)


def is_stream(response: httpx.Response) -> bool:
    return response.status_code == 200 and str(response.headers.get("content-type")).startswith(
        "text/event-stream"
    )


def request_id_of(response: httpx.Response) -> str:
    """The service's id of the request, or "". Ray's Python proxy appends one of its own."""
    return str(response.headers.get("x-request-id", "")).partition(",")[0].strip()


def is_proxy_failure(response: httpx.Response) -> bool:
    """Whether something in front of the service reports that the service is unreachable; the
    service's own answers are for the caller.
    """
    own = any(name.startswith("x-hermes-") for name in response.headers) or request_id_of(
        response
    ).startswith("req_")
    return response.status_code in (500, 502, 503, 504) and not own


def refusal(response: httpx.Response, body: bytes) -> httpx.RemoteProtocolError | None:
    """An answer after which asking for the rest is useless, as an error with the service's own
    message.
    """
    if not 400 <= response.status_code < 500 or response.status_code in (408, 425, 429):
        return None
    said = body[:200].decode(errors="replace")
    with suppress(ValueError, LookupError, TypeError):
        said = json.loads(body)["error"]["message"]
    return httpx.RemoteProtocolError(
        f"The stream cannot go on: {said} (HTTP {response.status_code})"
    )
