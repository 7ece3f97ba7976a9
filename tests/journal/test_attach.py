"""`hermes-serve attach` as its own process, before a real ingress that loses its connections."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from serve_app.contract import AttemptResult
from tests.journal.in_process import Door, door, in_process, keys_of, settings_of
from tests.tables import Failures
from tests.waiting import PATIENCE_S, eventually

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
ASKED = {"model": "hermes-tiny", "messages": [{"role": "user", "content": "Hello"}]}


@asynccontextmanager
async def attached(d: Door) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the proxy, which prints one line and ends well."""
    words = ("-P", "-m", "serve_app.cli.main", "attach", f"127.0.0.1:{d.port}/v1", "--port", "0")
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, cwd=ROOT, stdout=PIPE, stderr=STDOUT, env={"PYTHONPATH": str(ROOT)}
    )
    assert process.stdout is not None
    try:
        line = (await process.stdout.readline()).decode()
        found = re.search(r"http://127\.0\.0\.1:\d+(?=/v1 until)", line)
        assert found, line
        async with httpx.AsyncClient(base_url=found[0], timeout=PATIENCE_S) as http:
            yield http
    finally:
        process.send_signal(signal.SIGINT)
        rest = await process.stdout.read()
        assert (await process.wait(), rest) == (0, b"")


async def requests_of(d: Door) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await d.http.get("/v1/requests")).json()["data"]
    return found


async def test_a_stream_goes_on_behind_every_cut(redis_url: str, namespace: str) -> None:
    async with in_process(settings_of(redis_url, namespace)) as d, attached(d) as http:
        body, got = {**ASKED, "stream": True, "max_tokens": 60}, b""
        async with http.stream("POST", CHAT, json=body) as answer:
            async for chunk in answer.aiter_raw():
                if got.count(b"\n\n") // 15 < (got + chunk).count(b"\n\n") // 15:
                    d.cut()
                got += chunk
        (request,) = await requests_of(d)
        whole = await d.http.get(f"/v1/requests/{request['id']}/events")
        assert got == whole.content
        assert got.endswith(b"data: [DONE]\n\n")
        assert answer.headers["x-request-id"] == request["id"]


async def test_what_is_no_stream_is_asked_for_again_and_computed_once(
    redis_url: str, namespace: str
) -> None:
    begun, ready = asyncio.Event(), asyncio.Event()

    async def held(_: str, answer: Awaitable[AttemptResult]) -> AttemptResult:
        begun.set()
        await ready.wait()
        return await answer

    settings = settings_of(redis_url, namespace)
    async with in_process(settings, around=held) as d, attached(d) as http:
        posted = asyncio.create_task(http.post(CHAT, json={**ASKED, "max_tokens": 3}))
        await begun.wait()
        d.cut()
        ready.set()
        answer = await posted
        assert answer.status_code == 200, answer.text
        (request,) = await requests_of(d)
        assert request["id"] == answer.headers["x-request-id"]


async def test_a_client_that_leaves_frees_the_service(redis_url: str, namespace: str) -> None:
    async with (
        door(redis_url, namespace, ingress={"disconnect_grace_s": 0}) as d,
        attached(d) as http,
    ):
        posted = asyncio.create_task(http.post(CHAT, json={**ASKED, "stream": True}))
        (request_id,) = await d.waiting(1)
        posted.cancel()

        async def cancelled() -> bool:
            """Asked without reading its answer: who does that has come back."""
            (one,) = await requests_of(d)
            return (one["id"], one["state"]) == (request_id, "cancelled")

        await eventually(cancelled)


async def test_all_else_passes_and_no_web_page_does(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    settings = settings_of(redis_url, namespace, auth=keys_of(tmp_path, "acme"))
    own = {"authorization": "Bearer acme"}
    async with in_process(settings) as d, attached(d) as http:
        with Failures() as failures:
            for method, path, headers in (
                ("GET", "/v1/models?a=b", own),
                ("GET", "/v1/models", {}),
                ("GET", "/v1/nothing%2Felse", own),
                ("HEAD", "/healthz", {}),
                ("POST", CHAT, own),
                ("DELETE", "/v1/requests/req_1", own),
            ):
                with failures.of(method, path, headers):
                    through = await http.request(method, path, headers=headers)
                    direct = await d.http.request(method, path, headers=headers)
                    assert through.status_code == direct.status_code
                    assert through.content == direct.content
                    assert through.headers.keys() == direct.headers.keys()
            port, models = http.base_url.port, "/v1/models"
            for named, status in (
                ({"host": f"localhost:{port}"}, 200),
                ({"origin": f"http://127.0.0.1:{port}"}, 200),
                ({"host": f"rebound.example:{port}"}, 403),
                ({"host": "127.0.0.1"}, 403),
                ({"origin": "https://page.example"}, 403),
                ({"origin": "null"}, 403),
            ):
                with failures.of(named):
                    answer = await http.get(models, headers={**own, **named})
                    assert answer.status_code == status
