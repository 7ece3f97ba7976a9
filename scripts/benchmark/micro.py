"""`scripts/bench --micro`: the CPU time of a token's way through the service's own code.

A worker with the simulated engine and an ingress run in this process, on a real Redis and on the
event loop that Ray Serve uses, and the ASGI `send` of every client drops what it is given. So there
are no sockets of clients, no Ray, no HAProxy and no other process in the figure: it is what a
change of our code changes. Background loops are in it: with few users they are most of it.
"""

import asyncio
import logging
import statistics
import time
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from serve_app.cluster.replicas import Replicas
from serve_app.contract import AttemptResult
from serve_app.local import processes, redis_server
from serve_app.processes import IngressProcess, WorkerProcess, make_engine
from serve_app.settings import Settings

from .run import SystemFailed

_WORKER = "worker-1"
_READY_S = 60.0


def measure_micro(options: Namespace, folder: Path) -> int:
    """Print µs a token and ms a request at each `--concurrency`; returns the exit status."""
    logging.disable(logging.WARNING)
    redis = redis_server.start(folder / "redis")
    try:
        args = {
            "namespace": "hermes",
            "redis": {"url": redis.url()},
            "engine": {"kind": "simulated", "args": {"tokens_per_s": 100}},
            "workers": {"max_running_requests": max(options.concurrency)},
        }
        uvloop.run(_all(options, Settings.model_validate(args)))
    finally:
        processes.end(redis.pid)
    return 0


async def _all(options: Namespace, settings: Settings) -> None:
    print("users    µs a token, each round                    median    ms a request")
    async with _service(settings) as app:
        for users in options.concurrency:
            await _cpu_s(app, users, 4)  # what happens once
            tokens, requests = [], []
            for _ in range(options.rounds):
                short_s = await _cpu_s(app, users, 1)
                long_s = await _cpu_s(app, users, options.max_tokens)
                tokens.append((long_s - short_s) / (users * (options.max_tokens - 1)) * 1e6)
                requests.append(short_s / users * 1e3)
            each = " ".join(f"{one:.1f}" for one in tokens)
            median, request = statistics.median(tokens), statistics.median(requests)
            print(f"{users:>5}    {each:<40} {median:>8.1f} {request:>15.2f}", flush=True)


async def _cpu_s(app: Any, users: int, tokens: int) -> float:
    began_s = time.process_time()
    await asyncio.gather(*(_ask(app, tokens) for _ in range(users)))
    return time.process_time() - began_s


async def _ask(app: Any, tokens: int) -> None:
    """One streamed chat, as Ray Serve hands it to the ingress."""
    request = {"model": "hermes-tiny", "stream": True, "max_tokens": tokens}
    body = msgspec.json.encode({**request, "messages": [{"role": "user", "content": "Hello"}]})
    arriving = [{"type": "http.request", "body": body, "more_body": False}]
    left, status, words = asyncio.Event(), 0, 0

    async def receive() -> dict[str, Any]:
        if arriving:
            return arriving.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status, words
        status = message.get("status", status)
        words += message.get("body", b"").count(b" ")

    headers = {"host": "bench", "content-type": "application/json", "content-length": len(body)}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), str(value).encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 1),
        "state": {},
    }
    await app(scope, receive, send)
    left.set()
    if status != 200 or words < tokens:  # each has a blank behind it, and an event has more
        raise SystemFailed(f"status {status} with {words} blanks for {tokens} tokens")


@asynccontextmanager
async def _service(settings: Settings) -> AsyncIterator[Any]:
    worker = WorkerProcess(settings, _WORKER, "session-1", make_engine(settings))

    async def execute(request_id: str, epoch: int, replica: str, cause: str) -> AttemptResult:
        return AttemptResult.decode(await worker.replica.execute(request_id, epoch, replica, cause))

    replicas = Replicas()
    replicas.serving([_WORKER])
    ingress = IngressProcess(settings, "ingress-1", "session-1", execute, replicas)
    await worker.start()
    await ingress.start()
    try:
        async with asyncio.timeout(_READY_S):
            while not (ingress.readiness.report()[0] and ingress.limits.memory.seen):
                await asyncio.sleep(0.05)
        yield ingress.app()
    finally:
        await ingress.stop()
        await worker.stop()
