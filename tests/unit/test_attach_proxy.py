"""What the proxy of `hermes-serve attach` refuses by itself."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from typer.testing import CliRunner

from serve_app.cli import attach
from serve_app.cli.attach import Proxy
from serve_app.cli.main import app
from tests.http_server import Asked, Wire, sending, serving, whole

HEADERS = [(b"host", b"127.0.0.1:80")]


async def status_of(proxy: Proxy, *parts: bytes, **more: Any) -> int:
    """Of the answer to a request with this body; it is JSON with an error or something else."""
    arriving = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    arriving[-1]["more_body"] = False
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not arriving:
            await asyncio.Event().wait()
        return arriving.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"method": "GET", "raw_path": b"/healthz", "query_string": b"", "headers": HEADERS}
    await proxy({**scope, **more}, receive, send)
    assert json.loads(b"".join(message.get("body", b"") for message in sent))
    return int(sent[0]["status"])


async def test_all_bodies_together_have_a_bound() -> None:
    proxy = Proxy("http://127.0.0.1:1", 80, most_bytes=10)
    for parts, status in (
        ([b"12345", b"678901"], 413),
        ([b"1234567890"], 502),
        ([b"x" * 11], 413),
        ([b"12345", b"67890"], 502),
    ):
        assert await status_of(proxy, *parts) == status, parts
    await proxy.close()


async def test_a_silent_service_is_asked_again_with_the_same_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def play(asked: Asked, wire: Wire) -> None:
        if len(service.asked) == 1:
            wire.pause()  # until the proxy leaves
        wire.send(whole(200, b'{"answer": 42}'))

    monkeypatch.setitem(attach._WAITING, "read", 0.2)
    with serving(play) as service:
        proxy = Proxy(service.url, 80)
        assert await status_of(proxy, b"{}", method="POST", raw_path=b"/v1/completions") == 200
        await proxy.close()
    assert len(service.keys) >= 2
    assert len({*service.keys}) == 1
    assert {one.body for one in service.asked} == {b"{}"}


def test_what_cannot_be_attached_is_said_in_one_line() -> None:
    def hermes(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["attach", *words], prog_name="hermes-serve")
        return done.exit_code, done.stderr

    code, why = hermes("127.0.0.1:1")
    assert (code, "http://127.0.0.1:1 does not answer" in why, why.count("\n")) == (1, True, 1)
    ready = b'{"ready": true, "problem": null}'
    with (
        serving(sending(whole(200, ready))) as service,
        socket.create_server(("127.0.0.1", 0)) as s,
    ):
        port = s.getsockname()[1]
        code, why = hermes(service.url, "--port", str(port))
    assert (code, why) == (1, f"attach: port {port} cannot be used: Address already in use\n")
