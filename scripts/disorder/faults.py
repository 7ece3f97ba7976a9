"""What befalls a service: each fault by name, with how long it lasts and what it needs."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from redis.asyncio import Redis

from scripts.disorder.parts import Parts
from scripts.local import redis_server, service

HANG_S = 20.0
SLOW_S = 10.0
SLOW_ANSWER_MS = 2_000


@dataclass(frozen=True)
class Fault:
    """`strike` returns the `time.monotonic()` from which the service could go on: the kill, or Redis's return.

    `spares`: how many living processes of the kind it needs, itself included, so that somebody can take over.
    """

    kind: str
    spares: int
    strike: Callable[[Parts, int], Awaitable[float]]


async def _kill(parts: Parts, pid: int) -> float:
    parts.kill(pid)
    return time.monotonic()


async def _hang(parts: Parts, pid: int) -> float:
    """A process that stands still, and then goes on as if nothing had happened."""
    began_s = time.monotonic()
    parts.send(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(HANG_S)
    finally:
        parts.send(pid, signal.SIGCONT)
    return began_s


async def _kill_redis(parts: Parts, pid: int) -> float:
    parts.kill(pid)
    await asyncio.to_thread(parts.restart_redis)
    return time.monotonic()


async def _slow_redis(parts: Parts, pid: int) -> float:
    """Every command is answered, up to two seconds late, for ten seconds."""
    async with Redis.from_url(redis_server.as_operator(parts.service.redis_url), protocol=2) as redis:
        began_s = time.monotonic()
        while time.monotonic() < began_s + SLOW_S:
            await redis.execute_command("CLIENT", "PAUSE", SLOW_ANSWER_MS, "ALL")  # type: ignore[no-untyped-call]
            await asyncio.sleep(SLOW_ANSWER_MS / 1000)
    return time.monotonic()


FAULTS = {
    "worker": Fault("worker", 2, _kill),
    "engine": Fault("engine", 2, _kill),
    "engine-worker": Fault("engine-worker", 2, _kill),
    "ingress": Fault("ingress", 2, _kill),
    "haproxy": Fault("haproxy", 1, _kill),
    "controller": Fault("controller", 1, _kill),
    "redis": Fault("redis", 1, _kill_redis),
    "worker-hang": Fault("worker", 2, _hang),
    "ingress-hang": Fault("ingress", 2, _hang),
    "redis-slow": Fault("redis", 1, _slow_redis),
}
_WITH_ENGINE = ("worker", "engine", "engine-worker")
SIMULATED = ("worker", "ingress", "haproxy", "controller", "redis", "worker-hang", "ingress-hang", "redis-slow")
REAL = ("worker", "engine", "engine-worker", "ingress", "haproxy", "controller", "redis", "worker-hang")


def choose(parts: Parts, names: list[str], stopped: set[int], chance: random.Random) -> tuple[str, int] | None:
    """One of the faults that can strike now, with its victim; the rarest so far should stand first in `names`."""
    ready = service.readiness(parts.service.url)
    for name in names:
        fault = FAULTS[name]
        serving = "workers" if fault.kind in _WITH_ENGINE else "ingresses"
        if fault.spares > 1 and ready.get(serving, 0) - len(stopped) < fault.spares:
            continue  # a replica that still starts is no spare
        there = [pid for pid in parts.pids(fault.kind) if pid not in stopped]
        if len(there) >= fault.spares:
            return name, chance.choice(there)
    return None
