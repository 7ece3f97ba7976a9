"""A whole ingress in this process, behind uvicorn on a real socket. There is no worker: what is admitted waits."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import uvicorn
from journal_helpers import eventually

from serve_app.attempts import Outcome
from serve_app.ingress.app import build_app
from serve_app.ingress.runtime import Ingress
from serve_app.routing.fleet import Fleet
from serve_app.settings import Settings


class Door:
    """A running ingress and a client of it."""

    def __init__(self, ingress: Ingress, port: int, http: httpx.AsyncClient) -> None:
        self.ingress = ingress
        self.port = port
        self.http = http

    async def post(self, prompt: str, **headers: str) -> httpx.Response:
        """A chat request's answer; none comes unless it is refused."""
        body = {"model": "hermes-tiny", "messages": [{"role": "user", "content": prompt}], "stream": True}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)

    def posted(self, prompt: str, **headers: str) -> asyncio.Task[httpx.Response]:
        """The same in the background."""
        return asyncio.create_task(self.post(prompt, **headers))

    async def waiting(self, requests: int) -> list[str]:
        """Ids of what waits, once it is so many."""
        await eventually(lambda: len(self.ingress.waiting_room) == requests)
        await eventually(lambda: len(self.ingress.hub.request_ids) == requests)
        return self.ingress.hub.request_ids


class _Server(uvicorn.Server):
    """Leaves the test run's signals alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def cancelled_when_the_client_leaves(app: Any) -> Any:
    """As Ray Serve runs it."""

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


@asynccontextmanager
async def door(url: str, namespace: str, **sections: Any) -> AsyncIterator[Door]:
    """For the length of a test."""

    async def never(request_id: str, epoch: int, session: str, cause: str) -> Outcome:
        raise AssertionError("there is no worker")

    args = {"namespace": namespace, "redis": {"url": url}, "engine": {"kind": "simulated"}, **sections}
    ingress = Ingress(Settings.model_validate(args), "ingress-1", "cluster", never, Fleet())
    await ingress.start()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        app = cancelled_when_the_client_leaves(build_app(ingress))
        server = _Server(uvicorn.Config(app, log_level="critical", lifespan="off", ws="none"))
        serving = asyncio.create_task(server.serve([listening]))
        try:
            await eventually(lambda: server.started)
            await eventually(lambda: ingress.storage.memory)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
                yield Door(ingress, port, http)
        finally:
            server.should_exit = True
            await asyncio.gather(serving, return_exceptions=True)
            await ingress.stop()
