"""Calls an ASGI app in the same process, without a socket or HTTP parsing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from serve_app import timings
from serve_app.journal.facts import RequestLine

Message = dict[str, Any]
App = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]


async def call(
    app: App,
    line: RequestLine,
    body: bytes,
    headers: dict[str, str],
    send: Callable[[Message], Awaitable[None]],
) -> None:
    """Run one request. If this is cancelled, the app sees a disconnected client and gets time to
    clean up.
    """
    gone = asyncio.Event()
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if pending:
            return pending.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    all_headers = {**dict(line.headers), **headers, "content-length": str(len(body))}
    scope: Message = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": line.method,
        "scheme": "http",
        "path": line.path,
        "raw_path": line.path.encode(),
        "query_string": line.query.encode(),
        "root_path": "",
        "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in all_headers.items()],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
        "state": {},
    }
    task = asyncio.ensure_future(app(scope, receive, send))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        gone.set()
        done, _ = await asyncio.wait({task}, timeout=timings.APP_ABORT_S)
        if not done:
            task.cancel()
        raise
