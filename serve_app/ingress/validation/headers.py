"""Validates a request's headers, and refuses it with `RequestRefused`. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from serve_app.contract import Reason
from serve_app.errors import RequestRefused, invalid


def check_headers(headers: list[tuple[bytes, bytes]], limit_bytes: int) -> None:
    """Refuse headers whose total length exceeds the limit."""
    size = sum(len(name) + len(value) + 4 for name, value in headers)
    if size > limit_bytes:
        raise RequestRefused(
            Reason.HEADERS_TOO_LARGE,
            f"The request headers are {size} bytes long; at most {limit_bytes} are allowed.",
        )


def check_host(http_version: str, headers: list[tuple[bytes, bytes]]) -> None:
    """Refuse HTTP/1.1 without a `Host`, as RFC 9112 wants; not every server before us does."""
    if http_version == "1.1" and not any(name.lower() == b"host" for name, _ in headers):
        raise invalid("The request has no Host header.")


def check_content_encoding(coding: str) -> None:
    """Refuse a compressed body, whose size nobody knows before it is decoded."""
    if coding.strip().lower() not in ("", "identity"):
        raise RequestRefused(
            Reason.UNSUPPORTED_MEDIA_TYPE,
            f"The Content-Encoding '{coding[:40]}' is not supported; send the request without one.",
        )


def last_event_id(text: str | None) -> int:
    """The number in `Last-Event-ID`: of the last event that the client has; 0 if it has none."""
    if text is None or text == "":
        return 0
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise invalid(
            "The header Last-Event-ID must be the number of an event.",
            param="last-event-id",
        )
    return int(text)


def check_content_type(content_type: str) -> None:
    """Refuse everything except JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestRefused(
            Reason.UNSUPPORTED_MEDIA_TYPE,
            f"The Content-Type is {kind or 'missing'}; send the request as application/json.",
        )


def prefers_async(prefer: str) -> bool:
    """Whether a `Prefer` header (RFC 7240) asks for an answer at once, and the work later."""
    return any(one.strip().lower() == "respond-async" for one in prefer.split(","))


def seconds(headers: Mapping[str, str], name: str) -> float | None:
    """The number of seconds in a header; None if there is no such header."""
    text = headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise invalid(
            f"The header {name} must be a positive number of seconds, not '{text[:40]}'.",
            param=name,
        )
    return value
