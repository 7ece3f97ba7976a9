"""The command `attach`: a proxy on this machine's loopback address, through which every program has
what `serve_app/client.py` gives to httpx: POSTs that are computed once, and streams that go on
behind a broken connection. All else, credentials too, passes as it is, and nothing is logged.

Only programs of this machine can use it, and no web page: a browser says in `Host` and `Origin`
which site its script is from.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any

import httpx
import typer

from serve_app.cli.console import CommandFailed, Url, new_app, one_sentence
from serve_app.cli.service_api import ServiceApi
from serve_app.client import AsyncReconnectingTransport, is_repeatable, repeatable

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]

_PORT = 8400
_MOST_CONNECTIONS = 256
_MOST_BYTES = 512 << 20
"""Of all bodies together: each is held until it is answered, because it may be sent again."""
_WAITING = {"connect": 10.0, "read": 60.0, "write": 60.0, "pool": None}
"""A service is never silent in a stream for so long; what comes whole is then asked for again."""
_OF_A_CONNECTION = frozenset(
    b"connection content-length expect host keep-alive proxy-authenticate proxy-authorization "
    b"proxy-connection te trailer transfer-encoding upgrade".split()
)
_HELP = (
    "Serve a service on this machine, so that agents lose no stream to a broken connection.\n\n"
    "Give an agent the printed address as its base URL; its API key passes through."
)

app = new_app()


@app.command("attach", help=_HELP)
def attach(
    address: Annotated[str, typer.Argument(metavar="[URL]", help="address of the service")] = "",
    url: Url = "",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0: a free one")] = _PORT,
) -> None:
    """Serve a service on this machine until Ctrl-C."""
    with one_sentence("attach"), suppress(KeyboardInterrupt):
        with ServiceApi(address or url) as api:
            api.readiness()  # a wrong address fails at once
        asyncio.run(_serve(api.url, port))


async def _serve(url: str, port: int) -> None:
    import uvicorn  # takes 0.1 s

    try:
        listening = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise CommandFailed(
            f"port {port} cannot be used: {os.strerror(error.errno or 0)}"
        ) from None
    port = listening.getsockname()[1]
    proxy = Proxy(url, port)
    config = uvicorn.Config(
        proxy,
        log_level="critical",
        lifespan="off",
        ws="none",
        server_header=False,
        date_header=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_keep_alive=3_600,  # what is closed while a client writes to it looks broken
        timeout_graceful_shutdown=1,
    )
    print(f"{url} is served on http://127.0.0.1:{port}/v1 until Ctrl-C", flush=True)
    try:
        await uvicorn.Server(config).serve([listening])
    finally:
        await proxy.close()


class Proxy:
    """An ASGI application for the service at `url`, which is served on `port`."""

    def __init__(self, url: str, port: int, most_bytes: int = _MOST_BYTES) -> None:
        self._url = httpx.URL(url)
        self._hosts = {f"{name}:{port}".encode() for name in ("127.0.0.1", "localhost")}
        self._left_bytes = most_bytes
        inner = httpx.AsyncHTTPTransport(
            verify=self._url.scheme == "https", limits=httpx.Limits(max_connections=None)
        )
        self._transport = AsyncReconnectingTransport(give_up_after_s=600.0, transport=inner)

    async def close(self) -> None:
        await self._transport.aclose()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        headers: Headers = scope["headers"]
        named = dict(headers)
        host, origin = named.get(b"host", b""), named.get(b"origin")
        if host not in self._hosts or origin not in (None, b"http://" + host):
            await _refuse(send, 403, "Only programs of this machine may use this proxy.")
            return
        parts: list[bytes] = []
        try:
            while (message := await receive())["type"] == "http.request":
                parts.append(part := message.get("body", b""))
                self._left_bytes -= len(part)
                if self._left_bytes < 0:
                    await _refuse(send, 413, "There is no room for a body of this size.")
                    return
                if not message.get("more_body"):
                    await self._until_gone(self._answer(scope, b"".join(parts), send), receive)
                    return
        finally:
            self._left_bytes += sum(map(len, parts))

    async def _until_gone(self, answer: Awaitable[None], receive: Receive) -> None:
        """Answer; stop when the client leaves, and the service sees it leave."""
        tasks = [asyncio.ensure_future(answer), asyncio.ensure_future(receive())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, scope: Message, body: bytes, send: Send) -> None:
        try:
            answer = await self._asked(scope, body)
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            await _refuse(send, 502, f"{self._url} does not answer: {why}")
            return
        headers = _passed(answer.headers.raw)
        if "content-length" in answer.headers:
            headers.append((b"content-length", answer.headers["content-length"].encode()))
        start = {"type": "http.response.start", "status": answer.status_code, "headers": headers}
        await send(start)
        try:
            async for chunk in answer.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except httpx.HTTPError:
            return  # the server ends the connection before the answer is complete
        finally:
            await answer.aclose()
        await send({"type": "http.response.body"})

    async def _asked(self, scope: Message, body: bytes) -> httpx.Response:
        path = self._url.raw_path.rstrip(b"/") + scope["raw_path"]
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        request = httpx.Request(
            scope["method"],
            self._url.copy_with(raw_path=path + query),
            headers=_passed(scope["headers"]),
            content=body,
            extensions={"timeout": _WAITING},
        )
        if is_repeatable(request):
            request = repeatable(request)
        while True:
            try:
                return await self._transport.handle_async_request(request)
            except httpx.ReadTimeout:
                if request.method == "POST" and "idempotency-key" not in request.headers:
                    raise


def _passed(headers: Headers) -> list[tuple[bytes, bytes]]:
    return [(k, v) for k, v in headers if k.lower() not in _OF_A_CONNECTION]


async def _refuse(send: Send, status: int, why: str) -> None:
    error = {"message": why, "type": "proxy_error", "param": None, "code": None}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})
