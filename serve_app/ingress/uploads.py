"""Receives request bodies, and bounds the memory of those that are not accepted yet.

A client may announce a large body and never send the rest. What it has sent occupies memory until
the request is accepted (from then on the body is in Redis) or refused. A body that comes in one
small piece is complete at once and does not count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType

from starlette.types import Receive

from serve_app.contract import Reason
from serve_app.errors import RequestRefused
from serve_app.ingress.connection_limits import ConnectionLimit
from serve_app.settings import Settings

_SMALL_BYTES = 64 * 1024


class Uploads:
    """The bodies that one ingress holds for requests that are not accepted yet."""

    def __init__(self, settings: Settings) -> None:
        ingress = settings.ingress
        share = ingress.max_tenant_share if settings.auth.required else 1.0
        self.max_body_bytes = ingress.max_body_bytes
        self.stalled_s = ingress.stalled_client_timeout_s
        self.within_s = ingress.request_timeout_s
        # The largest body always fits.
        most = max(ingress.max_buffered_request_bytes, ingress.max_body_bytes)
        of_tenant = max(int(share * most), ingress.max_body_bytes)
        self.held = ConnectionLimit("bytes for large requests", most, of_tenant)

    def of(self, tenant: str) -> Upload:
        """The body of one request; it counts while the `with` block runs."""
        return Upload(self, tenant)


class Upload:
    """The body of one request."""

    __slots__ = ("_counted", "_tenant", "_uploads")

    def __init__(self, uploads: Uploads, tenant: str) -> None:
        self._uploads = uploads
        self._tenant = tenant
        self._counted = 0

    def __enter__(self) -> Upload:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._counted:
            self._uploads.held.release(self._tenant, self._counted)

    async def body(self, headers: Mapping[str, str], receive: Receive) -> bytes:
        """Receive the whole body.

        Args:
            headers: by lower-case name.

        Raises:
            RequestRefused: `body_too_large`, `client_disconnected`, `upload_timeout` (nothing came
                for long, or too slowly), and as `ConnectionLimit.take`.
        """
        self._check_length(headers.get("content-length", "0"))
        piece, more = await self._next(receive)
        if not more and len(piece) <= _SMALL_BYTES:
            return piece
        self._take(piece)
        if not more:
            return piece
        return bytes(await self._with_the_rest(bytearray(piece), receive))

    def grew(self, size: int) -> None:
        """Count what was put before the body, which has so many bytes now.

        Raises:
            RequestRefused: as `ConnectionLimit.take`.
        """
        more = size - self._counted
        if size > _SMALL_BYTES and more > 0:
            self._uploads.held.take(self._tenant, more)
            self._counted += more

    def _check_length(self, announced: str) -> None:
        if (
            announced.isascii()
            and announced.isdigit()
            and (len(announced) > 18 or int(announced) > self._uploads.max_body_bytes)
        ):
            raise self._too_large()

    def _take(self, piece: bytes) -> None:
        if self._counted + len(piece) > self._uploads.max_body_bytes:
            raise self._too_large()
        self._uploads.held.take(self._tenant, len(piece))
        self._counted += len(piece)

    async def _with_the_rest(self, body: bytearray, receive: Receive) -> bytearray:
        more = True
        try:
            async with asyncio.timeout(self._uploads.within_s):
                while more:
                    piece, more = await self._next(receive)
                    self._take(piece)
                    body += piece
        except TimeoutError:
            raise self._never_came() from None
        return body

    async def _next(self, receive: Receive) -> tuple[bytes, bool]:
        """The next piece of the body, and whether more follow."""
        try:
            async with asyncio.timeout(self._uploads.stalled_s):
                message = await receive()
        except TimeoutError:
            raise self._never_came() from None
        if message["type"] == "http.disconnect":
            raise RequestRefused(
                Reason.CLIENT_DISCONNECTED, "The client left before its request was complete."
            )
        return message.get("body", b""), message.get("more_body", False)

    def _never_came(self) -> RequestRefused:
        uploads = self._uploads
        return RequestRefused(
            Reason.UPLOAD_TIMEOUT,
            f"The rest of the request did not come: nothing for {uploads.stalled_s:g} s, or "
            f"not all of it in {uploads.within_s:g} s.",
        )

    def _too_large(self) -> RequestRefused:
        return RequestRefused(
            Reason.BODY_TOO_LARGE,
            f"The request body is longer than {self._uploads.max_body_bytes} bytes.",
        )
