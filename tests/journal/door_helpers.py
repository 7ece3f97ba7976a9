"""A complete ingress in this process, behind uvicorn on a real socket. Without a worker, admitted
requests wait.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import uvicorn

from serve_app.cluster.replicas import Replicas
from serve_app.contract import Answer, Execute
from serve_app.processes.ingress import IngressProcess
from serve_app.settings import Settings
from tests.journal.journal_helpers import redis_settings
from tests.waiting import PATIENCE_S, eventually


class Door:
    """A running ingress and a client of it."""

    def __init__(self, ingress: IngressProcess, port: int, http: httpx.AsyncClient) -> None:
        self.ingress = ingress
        self.port = port
        self.http = http

    async def post(self, prompt: str, **headers: str) -> httpx.Response:
        """The answer to a chat request; there is none unless it is refused."""
        body = {
            "model": "hermes-tiny",
            "messages": [{"role": "user", "content": prompt}],
            "stream": True,
        }
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)

    def posted(self, prompt: str, **headers: str) -> asyncio.Task[httpx.Response]:
        """The same, in the background."""
        return asyncio.create_task(self.post(prompt, **headers))

    async def waiting(self, requests: int) -> list[str]:
        """The ids of the waiting requests, once there are this many."""
        await eventually(lambda: len(self.ingress.limits.waiting) == requests)
        await eventually(lambda: len(self.ingress.followers.request_ids) == requests)
        return self.ingress.followers.request_ids


class _Server(uvicorn.Server):
    """Does not handle the test run's signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def cancelled_when_the_client_leaves(app: Any) -> Any:
    """Cancels the handler when its client leaves, as Ray Serve does."""

    async def run(scope: Any, receive: Any, send: Any) -> None:
        messages: asyncio.Queue[Any] = asyncio.Queue()

        async def fetch() -> None:
            while True:
                messages.put_nowait(message := await receive())
                if message["type"] == "http.disconnect":
                    return

        tasks = [asyncio.create_task(app(scope, messages.get, send)), asyncio.create_task(fetch())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    return run


def door_settings(url: str, namespace: str, **sections: Any) -> Settings:
    """The settings of an ingress, and of a worker beside it."""
    engine = {"kind": "simulated"}
    args = {"namespace": namespace, "redis": redis_settings(url), "engine": engine, **sections}
    return Settings.model_validate(args)


async def _never(request_id: str, epoch: int, session: str, cause: str) -> Answer:
    raise AssertionError("there is no worker")


@asynccontextmanager
async def door(
    redis_url: str,
    namespace: str,
    execute: Execute = _never,
    workers: Sequence[str] = (),
    **sections: Any,
) -> AsyncIterator[Door]:
    """A running ingress during a test.

    Args:
        workers: their names; `execute` calls each of them.
    """
    replicas = Replicas()
    replicas.serving(workers)
    settings = door_settings(redis_url, namespace, **sections)
    ingress = IngressProcess(settings, "ingress-1", "cluster", execute, replicas)
    await ingress.start()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        app = cancelled_when_the_client_leaves(ingress.app())
        server = _Server(uvicorn.Config(app, log_level="critical", lifespan="off", ws="none"))
        serving = asyncio.create_task(server.serve([listening]))
        try:
            await eventually(lambda: server.started)
            await eventually(lambda: ingress.limits.memory.seen)
            url = f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
                yield Door(ingress, port, http)
        finally:
            server.should_exit = True
            await asyncio.gather(serving, return_exceptions=True)
            await ingress.stop()
