"""Lets web pages of the allowed origins (`ingress.cors_origins`) call the service.

Starlette's middleware is not used, because the start of an answer keeps its headers
(`ResponseStart`).
Source: https://fetch.spec.whatwg.org/#http-cors-protocol
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve_app.ingress.answer import ResponseStart, Send
from serve_app.ingress.inference import Scope
from serve_app.ingress.uploads import Receive

Headers = list[tuple[bytes, bytes]]

_EXPOSED = (
    b"x-request-id, x-client-request-id, x-hermes-class, x-hermes-replica, x-hermes-engine, "
    b"x-hermes-attempts, x-hermes-queue-ms, x-hermes-reason, x-should-retry, retry-after, "
    b"retry-after-ms"
)
_METHODS = b"GET, HEAD, POST, DELETE"


class Cors:
    """ASGI middleware around everything else: a browser asks first (`OPTIONS`), without a key.

    Args:
        origins: such as `https://chat.example.com`; `*` allows every page.
    """

    def __init__(self, app: Any, origins: Sequence[str]) -> None:
        self._app = app
        self._all = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a browser's question, or add to the answer who may read it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = {name.lower(): value for name, value in scope["headers"]}
        own = self._allowing(asked.get(b"origin", b""))
        if b"access-control-request-method" in asked and scope["method"] == "OPTIONS" and own:
            wanted = asked.get(b"access-control-request-headers", b"")
            own += [
                (b"access-control-allow-methods", _METHODS),
                (b"access-control-allow-headers", wanted),
            ]
            await send(ResponseStart(type="http.response.start", status=204, headers=own))
            await send({"type": "http.response.body", "body": b""})
            return

        async def send_allowing(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = [*message["headers"], *own, (b"vary", b"Origin")]
                message = type(message)({**message, "headers": headers})
            await send(message)

        await self._app(scope, receive, send_allowing)

    def _allowing(self, origin: bytes) -> Headers:
        """The headers that let pages of an origin read the answer; none if they may not."""
        if not origin or not (self._all or origin in self._origins):
            return []
        return [
            (b"access-control-allow-origin", b"*" if self._all else origin),
            (b"access-control-expose-headers", _EXPOSED),
        ]
