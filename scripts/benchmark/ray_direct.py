"""Ray Serve's direct shape, as a measure of what a queue and a journal cost: one deployment behind
HAProxy, whose replicas stream the simulated engine's tokens to their own clients.
"""

import asyncio
import time
from typing import Any

import msgspec
from ray import serve
from ray.serve import Application

from serve_app.cli.serve_api import deploy
from workers.simulated_engine import ResponseFormat, body_part, embeddings, start, text_of

MODEL = "hermes-tiny"
TOKENS_PER_S = 100.0
"""For each running request, as `engine.args.tokens_per_s` of the simulated engine."""


class Direct:
    """An ASGI app with the simulated engine's steps: one token for every running request."""

    def __init__(self) -> None:
        self._running: set[asyncio.Event] = set()
        self._stepping: asyncio.Task[None] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/v1/models":
            await _answer(send, msgspec.json.encode({"object": "list", "data": [{"id": MODEL}]}))
            return
        body = b""
        while (message := await receive()) and message["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body"):
                break
        request = msgspec.json.decode(body)
        if scope["path"].endswith("/embeddings"):
            await self._embed(send, request)
            return
        shape = ResponseFormat("bench", MODEL, scope["path"].endswith("chat/completions"), 0)
        limit = request.get("max_completion_tokens") or request.get("max_tokens") or 64
        await send(start(b"text/event-stream; charset=utf-8"))
        words = text_of(msgspec.json.encode(request.get("messages", request.get("prompt"))))
        step = asyncio.Event()
        self._join(step)
        try:
            for number in range(1, limit + 1):
                await step.wait()
                step.clear()
                await send(body_part(shape.chunk(next(words), number == limit)))
        finally:
            self._running.discard(step)
        usage = {"prompt_tokens": len(body) // 4, "completion_tokens": limit}
        await send(body_part(shape.usage(usage) + b"data: [DONE]\n\n"))
        await send({"type": "http.response.body", "body": b""})

    async def _embed(self, send: Any, request: dict[str, Any]) -> None:
        step = asyncio.Event()
        self._join(step)
        try:
            await step.wait()
        finally:
            self._running.discard(step)
        await _answer(send, embeddings(request, MODEL)[0])

    def _join(self, step: asyncio.Event) -> None:
        self._running.add(step)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())

    async def _step(self) -> None:
        due_s = time.monotonic()
        while self._running:
            due_s = max(due_s + 1 / TOKENS_PER_S, time.monotonic())
            await asyncio.sleep(due_s - time.monotonic())
            for step in self._running:
                step.set()


async def _answer(send: Any, body: bytes) -> None:
    await send(start(b"application/json"))
    await send({"type": "http.response.body", "body": body})


@serve.deployment(name="Ingress", max_ongoing_requests=1000)
@serve.ingress()
class Ingress:
    """The deployment; named as ours, so that the tables count it as the same kind of process."""

    def __serve_build_asgi_app__(self) -> Any:
        """Serve calls this after the constructor."""
        return Direct()


def build(args: dict[str, Any]) -> Application:
    """Serve calls this on the cluster."""
    return Ingress.options(num_replicas=args["replicas"]).bind()  # type: ignore[attr-defined]


def start_serving(dashboard_url: str, port: int, replicas: int) -> None:
    """Deploy this application on a private Ray."""
    application = {
        "name": "direct",
        "route_prefix": "/",
        "import_path": "scripts.benchmark.ray_direct:build",
        "args": {"replicas": replicas},
    }
    deploy(
        dashboard_url,
        {
            "proxy_location": "EveryNode",
            "http_options": {"host": "127.0.0.1", "port": port},
            "logging_config": {"enable_access_log": False},
            "applications": [application],
        },
    )
