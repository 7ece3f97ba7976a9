"""What one ingress holds of connections, uploads and answers, in total and from one tenant.

A client may announce a large body and never send the rest. What it has sent occupies memory until
the request is accepted (from then on the body is in Redis) or refused. A body that comes in one
small piece is complete at once and does not count.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.types import Receive

from serve_app import timings
from serve_app.contract import Reason
from serve_app.errors import RequestRefused
from serve_app.settings import Settings

_SMALL_BYTES = 64 * 1024


@dataclass(eq=False)
class ConnectionLimit:
    """A limit for one kind of connection, or for what connections hold. `what`: the kind as an
    error message names it, such as `connections`.
    """

    what: str
    most: int
    most_of_tenant: int
    _held: Counter[str] = field(default_factory=Counter, init=False)

    def __len__(self) -> int:
        return self._held.total()

    def check(self, tenant: str, size: int = 1) -> None:
        """Whether a tenant may have more.

        Raises:
            RequestRefused: `too_many_connections`; `tenant_limit` if others may have more.
        """
        if self._held.total() + size > self.most:
            raise RequestRefused(
                Reason.TOO_MANY_CONNECTIONS,
                f"All {self.most} {self.what} are taken; please try again later.",
                retry_after_s=timings.RETRY_AFTER_S,
            )
        if self._held[tenant] + size > self.most_of_tenant:
            raise RequestRefused(
                Reason.TENANT_LIMIT,
                f"You hold {self._held[tenant]} {self.what} here already; please try again later.",
                retry_after_s=timings.RETRY_AFTER_S,
            )

    def count(self, tenant: str, size: int = 1) -> None:
        """Count more of a tenant, whether or not it may have that."""
        self._held[tenant] += size

    def take(self, tenant: str, size: int = 1) -> None:
        """Count more of a tenant; raises as `check`."""
        self.check(tenant, size)
        self.count(tenant, size)

    def release(self, tenant: str, size: int = 1) -> None:
        self._held[tenant] -= size
        if not self._held[tenant]:
            del self._held[tenant]

    @contextmanager
    def hold(self, tenant: str) -> Iterator[None]:
        """Count a connection of a tenant while the block runs; raises as `check`."""
        self.take(tenant)
        try:
            yield
        finally:
            self.release(tenant)


def _limit(settings: Settings, what: str, most: int, least: int = 1) -> ConnectionLimit:
    """A tenant gets its share of it, and at least so much."""
    share = settings.ingress.max_tenant_share if settings.auth.required else 1.0
    return ConnectionLimit(what, most, max(int(share * most), least))


class ConnectionLimits:
    """The limits of one ingress. Short requests, such as a `DELETE`, are not counted."""

    def __init__(self, settings: Settings) -> None:
        ingress = settings.ingress
        self.requests = _limit(settings, "connections", ingress.max_connections)
        self.event_readers = _limit(settings, "readers of events", ingress.max_readers)
        what = "bytes of answers that wait to be read"
        self.unread = _limit(settings, what, ingress.max_buffered_response_bytes)
        """What answers above `timings.LARGE_BYTES` take until their clients have them. Whoever
        finds any room has one answer, of whatever size.
        """
        self.file_uploads = _limit(settings, "uploads of files", settings.files.max_uploads)


def check_content_encoding(coding: str) -> None:
    """Refuse a compressed body, whose size nobody knows before it is decoded."""
    if coding.strip().lower() not in ("", "identity"):
        raise RequestRefused(
            Reason.UNSUPPORTED_MEDIA_TYPE,
            f"The Content-Encoding '{coding[:40]}' is not supported; send the request without one.",
        )


def check_content_type(content_type: str) -> None:
    """Refuse everything except JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestRefused(
            Reason.UNSUPPORTED_MEDIA_TYPE,
            f"The Content-Type is {kind or 'missing'}; send the request as application/json.",
        )


class Uploads:
    """The bodies that one ingress holds for requests that are not accepted yet."""

    def __init__(self, settings: Settings) -> None:
        ingress = settings.ingress
        self.max_body_bytes = largest = ingress.max_body_bytes  # which always fits
        self.stalled_s = ingress.stalled_client_timeout_s
        self.within_s = ingress.request_timeout_s
        most = max(ingress.max_buffered_request_bytes, largest)
        self.held = _limit(settings, "bytes for large requests", most, largest)

    @contextmanager
    def of(self, tenant: str) -> Iterator[Upload]:
        """The body of one request; it counts while the `with` block runs."""
        upload = Upload(self, tenant)
        try:
            yield upload
        finally:
            if upload.counted:
                self.held.release(tenant, upload.counted)

    async def next_piece(self, receive: Receive) -> tuple[bytes, bool]:
        """The next piece of a body, and whether more follow.

        Raises:
            RequestRefused: `client_disconnected`, `upload_timeout`.
        """
        try:
            async with asyncio.timeout(self.stalled_s):
                message = await receive()
        except TimeoutError:
            raise self.never_came() from None
        if message["type"] == "http.disconnect":
            raise RequestRefused(
                Reason.CLIENT_DISCONNECTED, "The client left before its request was complete."
            )
        return message.get("body", b""), message.get("more_body", False)

    def never_came(self, within_s: float | None = None) -> RequestRefused:
        """`within_s`: how long the whole body may take, if not as long as a request."""
        return RequestRefused(
            Reason.UPLOAD_TIMEOUT,
            f"The rest of the request did not come: nothing for {self.stalled_s:g} s, or "
            f"not all of it in {within_s or self.within_s:g} s.",
        )


@dataclass(eq=False)
class Upload:
    """The body of one request."""

    _uploads: Uploads
    _tenant: str
    counted: int = 0

    async def body(self, headers: Mapping[str, str], receive: Receive) -> bytes:
        """Receive the whole body. `headers`: by lower-case name.

        Raises:
            RequestRefused: `unsupported_media_type`, `body_too_large`, `client_disconnected`,
                `upload_timeout` (nothing came for long, or too slowly), and as
                `ConnectionLimit.take`.
        """
        check_content_encoding(headers.get("content-encoding", ""))
        announced = headers.get("content-length", "0")
        if announced.isascii() and announced.isdigit():
            self._check_size(int(announced[:20]))
        piece, more = await self._uploads.next_piece(receive)
        if not more and len(piece) <= _SMALL_BYTES:
            return piece
        self._take(piece)
        if not more:
            return piece
        body = bytearray(piece)
        try:
            async with asyncio.timeout(self._uploads.within_s):
                while more:
                    piece, more = await self._uploads.next_piece(receive)
                    self._take(piece)
                    body += piece
        except TimeoutError:
            raise self._uploads.never_came() from None
        return bytes(body)

    def grew(self, size: int) -> None:
        """Count what was put before the body, which has so many bytes now; raises as
        `ConnectionLimit.take`.
        """
        more = size - self.counted
        if size > _SMALL_BYTES and more > 0:
            self._uploads.held.take(self._tenant, more)
            self.counted += more

    def _take(self, piece: bytes) -> None:
        self._check_size(self.counted + len(piece))
        self._uploads.held.take(self._tenant, len(piece))
        self.counted += len(piece)

    def _check_size(self, size: int) -> None:
        most = self._uploads.max_body_bytes
        if size > most:
            message = f"The request body is longer than {most} bytes."
            raise RequestRefused(Reason.BODY_TOO_LARGE, message)
