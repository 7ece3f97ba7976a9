"""A service in this process, on a real Redis: ingresses and workers that are started, called and
stopped as by Ray Serve, without Ray. A `Door` is an ingress behind uvicorn on a real socket.
"""

from __future__ import annotations

import asyncio
import hashlib
import pickle
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from serve_app.cluster.replicas import Replicas
from serve_app.contract import AttemptResult, Execute
from serve_app.ingress.client_connections import HttpProtocol
from serve_app.processes import IngressProcess, WorkerProcess, make_engine
from serve_app.settings import Settings
from tests.journal.journal_helpers import redis_settings
from tests.waiting import PATIENCE_S, eventually
from workers.engine import Engine

WORKER = "worker-1"
Around = Callable[[str, Awaitable[AttemptResult]], Awaitable[AttemptResult]]


def settings_of(url: str, namespace: str, **sections: Any) -> Settings:
    """The settings of ingresses and workers. Their engine is a simulated one."""
    engine = {"kind": "simulated"}
    args = {"namespace": namespace, "redis": redis_settings(url), "engine": engine, **sections}
    return Settings.model_validate(args)


def keys_of(folder: Path, *tenants: str) -> dict[str, Any]:
    """The section `auth` with a keys file in which each key is its tenant's name."""
    digests = {tenant: hashlib.sha256(tenant.encode()).hexdigest() for tenant in tenants}
    lines = [f"{tenant} sha256:{digest}\n" for tenant, digest in digests.items()]
    (folder / "keys").write_text("".join(lines))
    return {"required": True, "keys_file": str(folder / "keys")}


@asynccontextmanager
async def worker_process(
    settings: Settings, engine: Engine | None = None, name: str = WORKER
) -> AsyncIterator[WorkerProcess]:
    """A worker, whose engine is that of the settings unless another one is given."""
    worker = WorkerProcess(settings, name, "session-1", engine or make_engine(settings))
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop()


def calling(worker: WorkerProcess) -> Execute:
    """Calls a worker as Ray does, which pickles the answer."""

    async def execute(request_id: str, epoch: int, replica: str, cause: str) -> AttemptResult:
        answer = await worker.replica.execute(request_id, epoch, replica, cause)
        return AttemptResult.decode(pickle.loads(pickle.dumps(answer)))

    return execute


async def never(request_id: str, epoch: int, replica: str, cause: str) -> AttemptResult:
    """The calls of an ingress that sees no worker."""
    raise AssertionError("there is no worker")


@asynccontextmanager
async def ingress_process(
    settings: Settings,
    execute: Execute = never,
    workers: Sequence[str] = (),
    name: str = "ingress-1",
    cluster: str = "session-1",
) -> AsyncIterator[IngressProcess]:
    """An ingress.

    Args:
        workers: those that it sees; `execute` calls each of them.
    """
    replicas = Replicas()
    replicas.serving(workers)
    ingress = IngressProcess(settings, name, cluster, execute, replicas)
    try:
        await ingress.start()
        yield ingress
    finally:
        await ingress.stop()


class Door:
    """A running ingress and a client of it."""

    def __init__(
        self, ingress: IngressProcess, port: int, http: httpx.AsyncClient, server: uvicorn.Server
    ) -> None:
        self.ingress = ingress
        self.port = port
        self.http = http
        self._server = server
        self._posted: list[asyncio.Task[httpx.Response]] = []

    async def post(self, prompt: str, **headers: str) -> httpx.Response:
        """The answer to a chat request; without a worker there is none unless it is refused."""
        messages = [{"role": "user", "content": prompt}]
        body = {"model": "hermes-tiny", "messages": messages, "stream": True}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)

    def posted(self, prompt: str, **headers: str) -> asyncio.Task[httpx.Response]:
        """The same, in the background; its client leaves when the door closes."""
        self._posted.append(asyncio.create_task(self.post(prompt, **headers)))
        return self._posted[-1]

    async def detached(self, prompt: str, request_class: str = "standard", **fields: Any) -> str:
        """The id of a chat request that goes on without a client."""
        messages = [{"role": "user", "content": prompt}]
        body = {"model": "hermes-tiny", "messages": messages, **fields}
        headers = {"prefer": "respond-async", "x-hermes-class": request_class}
        answer = await self.http.post("/v1/chat/completions", json=body, headers=headers)
        return str(answer.headers["x-request-id"])

    async def close(self) -> None:
        """All clients leave."""
        for task in self._posted:
            task.cancel()
        await asyncio.gather(*self._posted, return_exceptions=True)

    def cut(self) -> None:
        """Break all connections, as the death of the ingress would."""
        for one in list(self._server.server_state.connections):
            one.transport.abort()

    @property
    def buffered(self) -> list[int]:
        """The bytes that the server holds for each connection, because its client does not read."""
        transports = [one.transport for one in self._server.server_state.connections]
        return [one.get_write_buffer_size() for one in transports]

    async def waiting(self, requests: int) -> list[str]:
        """The ids of the waiting requests, once there are this many. Those that have ended may be
        followed for a moment longer.
        """

        def ids() -> list[str]:
            followed = self.ingress.followers._followers.items()
            return [name for name, them in followed if any(not one.reader.ending for one in them)]

        await eventually(lambda: len(self.ingress.limits.waiting) == requests)
        await eventually(lambda: len(ids()) == requests)
        return ids()


class _Server(uvicorn.Server):
    """Does not handle the test run's signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _cancelled_when_the_client_leaves(app: Any) -> Any:
    """Cancels the handler when its client leaves, as Ray Serve does, which reads ahead for that."""

    async def run(scope: Any, receive: Any, send: Any) -> None:
        messages: asyncio.Queue[Any] = asyncio.Queue(8)

        async def fetch() -> None:
            while True:
                await messages.put(message := await receive())
                if message["type"] == "http.disconnect":
                    return

        tasks = [asyncio.create_task(app(scope, messages.get, send)), asyncio.create_task(fetch())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    return run


@asynccontextmanager
async def door_of(ingress: IngressProcess) -> AsyncIterator[Door]:
    """Serves an ingress that runs."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # or it takes megabytes
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        app = _cancelled_when_the_client_leaves(ingress.app())
        config = uvicorn.Config(
            app,
            http=HttpProtocol,
            timeout_keep_alive=3_600,  # what is closed while a client writes to it looks broken
            log_level="critical",
            lifespan="off",
            ws="none",
        )
        server = _Server(config)
        serving = asyncio.create_task(server.serve([listening]))
        try:
            await eventually(lambda: server.started)
            await eventually(lambda: ingress.limits.memory.seen)
            url = f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
                made = Door(ingress, port, http, server)
                yield made
                await made.close()
        finally:
            server.should_exit = True
            await asyncio.gather(serving, return_exceptions=True)


@asynccontextmanager
async def door(redis_url: str, namespace: str, **sections: Any) -> AsyncIterator[Door]:
    """An ingress that sees no worker: what it admits waits."""
    async with (
        ingress_process(settings_of(redis_url, namespace, **sections)) as ingress,
        door_of(ingress) as made,
    ):
        yield made


@asynccontextmanager
async def in_process(
    settings: Settings,
    engine: Engine | None = None,
    around: Around = lambda _, answer: answer,
) -> AsyncIterator[Door]:
    """An ingress and a worker, both ready.

    Args:
        engine: another one than that of the settings.
        around: is called with a request's id and the worker's coming answer, and waits for it.
    """
    async with worker_process(settings, engine) as worker:
        call = calling(worker)

        async def execute(request_id: str, epoch: int, replica: str, cause: str) -> AttemptResult:
            return await around(request_id, call(request_id, epoch, replica, cause))

        async with (
            ingress_process(settings, execute, [WORKER]) as ingress,
            door_of(ingress) as made,
        ):
            await eventually(lambda: ingress.readiness.report()[0])
            yield made
