"""Validates a request's headers. Pure."""

from __future__ import annotations

from serve_app.contract import Reason
from serve_app.errors import RequestRefused


def check_headers(headers: list[tuple[bytes, bytes]], limit_bytes: int) -> None:
    """Refuse headers whose total length exceeds the limit.

    Raises:
        RequestRefused: `headers_too_large`.
    """
    size = sum(len(name) + len(value) + 4 for name, value in headers)
    if size > limit_bytes:
        raise RequestRefused(
            Reason.HEADERS_TOO_LARGE,
            f"The request headers are {size} bytes long; at most {limit_bytes} are allowed.",
        )


def check_content_type(content_type: str) -> None:
    """Refuse everything except JSON.

    Raises:
        RequestRefused: `unsupported_media_type`.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestRefused(
            Reason.UNSUPPORTED_MEDIA_TYPE,
            f"The Content-Type is {kind or 'missing'}; send the request as application/json.",
        )
