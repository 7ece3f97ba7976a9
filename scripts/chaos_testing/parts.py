"""The processes of a running service, and the faults that are done to them: each by name, with its
duration and its preconditions.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from redis.asyncio import Redis

from scripts.benchmark.processes import classify
from serve_app.local import processes, ray_cluster, redis_server
from serve_app.local.service import Service, is_whole, readiness
from serve_app.policy.classes import CLASSES
from serve_app.redis.keyspace import (
    ingresses_key,
    metrics_key,
    queue_key,
    wake_channel,
    workers_key,
)

HANG_S = 20.0
SLOW_S = 10.0
SLOW_ANSWER_MS = 2_000
KINDS = {
    "worker": "worker replica",
    "engine": "engine core",
    "engine-worker": "engine worker",
    "ingress": "ingress replica",
    "haproxy": "haproxy",
    "controller": "serve controller",
}


class Parts:
    """The processes of one service; sends signals to them by pid."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._folder = str(ray_cluster.short_folder(Path(service.state_dir)))

    def pids(self, kind: str) -> list[int]:
        """The living processes of a kind (`KINDS`, `redis`, the `cable` to it, or any `replica`),
        oldest first.
        """
        if kind in ("redis", "cable"):
            named = self.service.pids
            return [named[kind]] if kind in named and processes.is_alive(named[kind]) else []
        if kind == "replica":
            return sorted(self.pids("worker") + self.pids("ingress"))
        return sorted(
            pid
            for pid in processes.marked("RAY_TMPDIR", self._folder)
            if classify(processes.command_line(pid)) == KINDS[kind] and processes.is_alive(pid)
        )

    def kill(self, pid: int) -> None:
        ray_cluster.note_shared_memory(Path(self.service.state_dir))
        self.send(pid, signal.SIGKILL)

    def send(self, pid: int, sign: signal.Signals) -> None:
        """Send a signal; a process that has ended meanwhile is ignored."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sign)

    @property
    def clocks(self) -> Path:
        """The folder of the processes' clocks, see `clocks/sitecustomize.py`."""
        return Path(self.service.state_dir) / "clocks"

    def operator(self) -> Redis:
        """A client of the private Redis whose user may do everything."""
        client: Redis = Redis.from_url(redis_server.as_operator(self.service.redis_url), protocol=2)
        return client

    def until_whole(self) -> None:
        """Wait until every replica of the service is back."""
        while not is_whole(readiness(self.service.url)):
            time.sleep(0.1)


@dataclass(frozen=True)
class Fault:
    """`strike` returns the `time.monotonic()` from which the service could recover: the kill, or
    Redis's return.

    `spares`: how many living processes of this kind the fault needs, including the victim, so that
    another can take over.
    """

    kind: str
    spares: int
    strike: Callable[[Parts, int], Awaitable[float]]


async def _kill(parts: Parts, pid: int) -> float:
    parts.kill(pid)
    return time.monotonic()


async def _stop(parts: Parts, pid: int, seconds: float) -> None:
    """Stop a process, and continue it later."""
    parts.send(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        parts.send(pid, signal.SIGCONT)


async def _hang(parts: Parts, pid: int) -> float:
    began_s = time.monotonic()
    await _stop(parts, pid, HANG_S)
    return began_s


async def _kill_redis(parts: Parts, pid: int) -> float:
    parts.kill(pid)
    await asyncio.to_thread(parts.service.restart_redis)
    return time.monotonic()


async def _slow_redis(parts: Parts, pid: int) -> float:
    """For ten seconds, answer every command up to two seconds late."""
    async with parts.operator() as redis:
        began_s = time.monotonic()
        while time.monotonic() < began_s + SLOW_S:
            await redis.execute_command("CLIENT", "PAUSE", SLOW_ANSWER_MS, "ALL")  # type: ignore[no-untyped-call]
            await asyncio.sleep(SLOW_ANSWER_MS / 1000)
    return time.monotonic()


async def _hang_redis(parts: Parts, pid: int) -> float:
    """Redis accepts connections and answers nothing."""
    await _stop(parts, pid, SLOW_S)
    return time.monotonic()


async def _fill_redis(parts: Parts, pid: int) -> float:
    """Leave Redis no memory for new data."""
    async with parts.operator() as redis:
        had = (await redis.config_get("maxmemory"))["maxmemory"]
        await redis.config_set("maxmemory", 1)
        try:
            await asyncio.sleep(SLOW_S)
        finally:
            await redis.config_set("maxmemory", str(had))
    return time.monotonic()


async def _cut_subscriptions(parts: Parts, pid: int) -> float:
    """Make the ingresses' subscriptions half open, without notice."""
    parts.send(pid, signal.SIGUSR1)
    return time.monotonic()


async def _set_clock(parts: Parts, pid: int) -> float:
    """Move a process's clock; it stays so until the process ends."""
    (parts.clocks / str(pid)).write_text(random.choice(("8", "-8")))
    return time.monotonic()


async def _write_nonsense(parts: Parts, pid: int) -> float:
    """Write malformed entries everywhere that processes read each other's data."""
    namespace, model, nonsense = "hermes", parts.service.model, b"\xff\x00 no such thing"
    async with parts.operator() as redis:
        for request_class in CLASSES:
            line = queue_key(namespace, model, request_class)
            await redis.xadd(line, {nonsense: nonsense})
            await redis.xadd(
                line, {"r": "req_of_nobody", "t": "t", "s": "s", "d": "soon", "c": nonsense}
            )
        far_ms = int(time.time() * 1000) + 5_000
        await redis.zadd(ingresses_key(namespace), {nonsense: far_ms})
        await redis.zadd(workers_key(namespace), {b"no capacity": far_ms, nonsense: far_ms})
        for channel in await redis.pubsub_channels(wake_channel(namespace, "*")):
            await redis.publish(channel, nonsense)
        async for key in redis.scan_iter(match=metrics_key(namespace, "*")):
            await redis.set(key, nonsense, ex=5)
    return time.monotonic()


FAULTS = {
    "worker": Fault("worker", 2, _kill),
    "engine": Fault("engine", 2, _kill),
    "engine-worker": Fault("engine-worker", 2, _kill),
    "ingress": Fault("ingress", 2, _kill),
    "haproxy": Fault("haproxy", 1, _kill),
    "controller": Fault("controller", 1, _kill),
    "worker-hang": Fault("worker", 2, _hang),
    "ingress-hang": Fault("ingress", 2, _hang),
    "redis": Fault("redis", 1, _kill_redis),
    "redis-slow": Fault("redis", 1, _slow_redis),
    "redis-hang": Fault("redis", 1, _hang_redis),
    "redis-full": Fault("redis", 1, _fill_redis),
    "subscription-half-open": Fault("cable", 1, _cut_subscriptions),
    "clock-skew": Fault("replica", 1, _set_clock),
    "malformed-entry": Fault("redis", 1, _write_nonsense),
}
_WITH_ENGINE = ("worker", "engine", "engine-worker")
SIMULATED = tuple(name for name in FAULTS if name not in ("engine", "engine-worker"))
REAL = tuple(name for name in FAULTS if name != "ingress-hang")
LASTING = ("worker-hang", "ingress-hang", "redis-slow", "redis-hang", "redis-full")
"""Faults that last; only one of them at a time, because there are spares for one."""


def choose(
    parts: Parts, names: list[str], stopped: set[int], chance: random.Random
) -> tuple[str, int] | None:
    """Choose a fault that is possible now, and its victim. Put the rarest so far first in
    `names`.
    """
    ready = readiness(parts.service.url)
    for name in names:
        fault = FAULTS[name]
        serving = "workers" if fault.kind in _WITH_ENGINE else "ingresses"
        if fault.spares > 1 and ready.get(serving, 0) - len(stopped) < fault.spares:
            continue  # a replica that is still starting is not a spare
        there = [pid for pid in parts.pids(fault.kind) if pid not in stopped]
        if len(there) >= fault.spares:
            return name, chance.choice(there)
    return None
