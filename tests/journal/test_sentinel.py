"""A primary, its replica and three real Sentinels: the primary dies, and a stream goes on behind the other."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import RedisError

from scripts.local import processes, redis_server
from tests.journal.journal_helpers import add, events, eventually, everything, finish, world

ASKED = "of the Sentinels"


class Group:
    """Three Sentinels that watch `main`: a primary and its replica."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self.password = secrets.token_urlsafe(24)
        self.pids: dict[int, int] = {}
        self.primary = self._serve("primary")
        self.replica = self._serve("replica", replicaof=f"127.0.0.1 {self.primary}")
        watched = (
            f'requirepass "{ASKED}"\nsentinel sentinel-pass "{ASKED}"\n'
            f"sentinel monitor main 127.0.0.1 {self.primary} 2\n"
            f"sentinel auth-user main operator\nsentinel auth-pass main {self.password}\n"
            "sentinel down-after-milliseconds main 1000\nsentinel failover-timeout main 4000\n"
        )
        self.sentinels = [self._start(f"sentinel-{n}", watched, "--sentinel") for n in range(3)]
        hosts = ",".join(f"127.0.0.1:{port}" for port in [1, *self.sentinels])  # the first of them is away
        asked = ASKED.replace(" ", "%20")
        self.url = f"redis+sentinel://hermes:{self.password}@{hosts}/main/0?sentinel_password={asked}"

    def _serve(self, name: str, **settings: object) -> int:
        """A server with production's users; here replication and Sentinel come as the operator."""
        own = {"masteruser": "operator", "masterauth": self.password, "repl-diskless-sync-delay": 0, **settings}
        server = redis_server.start(self._folder / name, namespace="t*", settings=own, password=self.password)
        self.pids[server.port] = server.pid
        self._stack.callback(processes.end, server.pid)
        return server.port

    def _start(self, name: str, text: str, *more: str) -> int:
        server, port = redis_server.find_server(), processes.free_port()
        assert server is not None
        folder = self._folder / name
        folder.mkdir()
        (folder / "conf").write_text(f"port {port}\nbind 127.0.0.1\ndir {folder}\n{text}")
        self.pids[port] = pid = processes.start([server, str(folder / "conf"), *more], folder / "log", {}, folder)
        self._stack.callback(processes.end, pid)
        return port

    def watched(self) -> bool:
        """Whether the replica has what the primary has, and every Sentinel knows it and the two others."""
        return self._role(self.replica)[3] == "connected" and all(self._watched_by(port) for port in self.sentinels)

    def _watched_by(self, port: int) -> bool:
        try:
            with Redis(port=port, password=ASKED, protocol=2) as redis:
                state: Any = redis.sentinel_masters()
        except RedisError:
            return False
        return (state["main"]["num-slaves"], state["main"]["num-other-sentinels"]) == (1, 2)

    def is_primary(self, port: int) -> bool:
        """What the server itself says."""
        return bool(self._role(port)[0] == "master")

    def _role(self, port: int) -> Any:
        login = {"username": "operator", "password": self.password}
        with Redis(port=port, **login, protocol=2, decode_responses=True) as redis:
            return redis.execute_command("ROLE")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with ExitStack() as stack:
        yield Group(tmp_path, stack)


@contextmanager
def paused(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_stream_goes_on_behind_the_replica_that_sentinel_makes_the_primary(group: Group, namespace: str) -> None:
    async def main() -> None:
        await eventually(group.watched)
        async with world(group.url, namespace) as w:
            writer, hub = await w.writer(), await w.hub()
            follower = hub.follow_new("req_1")
            await w.admit()
            attempt = await w.opened(writer)
            for number in range(1, 4):
                add(attempt, number)
            reading = asyncio.create_task(everything(follower))
            await eventually(lambda: follower.reader.last_event == 3)
            os.kill(group.pids[group.primary], signal.SIGKILL)
            for number in range(4, 7):
                add(attempt, number)
            finish(attempt)
            assert await reading == events(1, 6)
            assert await w.redis.ping()
            entries = await w.entries()
            assert entries[-1].fields[b"k"] == b"completed"
        assert group.is_primary(group.replica)

    asyncio.run(main())


def test_a_sentinel_that_does_not_answer_is_passed_over(group: Group, namespace: str) -> None:
    async def main() -> None:
        await eventually(group.watched)
        with paused(group.pids[group.sentinels[0]]):
            async with world(group.url, namespace) as w:
                await w.admit()
                assert await w.ids() == ["0-1"]

    asyncio.run(main())
