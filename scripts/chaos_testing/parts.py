"""Identifies the processes of a running service."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from redis.asyncio import Redis

from scripts.benchmark.processes import classify
from scripts.local import processes, ray_cluster, redis_server
from scripts.local.service import Service, is_whole, readiness

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
            return [
                pid
                for name, pid in self.service.pids.items()
                if name == kind and processes.is_alive(pid)
            ]
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
