"""Redis with each of the users' files that the project ships, killed again and again under 16 streams."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import pytest
from journal_helpers import OPENED, World, add, events, eventually, everything, finish, world

from scripts.local import processes, redis_server
from scripts.local.environment import ROOT
from serve_app.errors import JournalUnavailable
from serve_app.journal.attempt import Attempt

STREAMS, KILLS = 16, 10
CHART = ROOT / "helm" / "hermes-serve" / "files" / "redis-start.sh"


def of_the_chart(folder: Path, password: str) -> Path:
    """The users that the chart's script writes before it becomes redis-server."""
    folder.mkdir()
    stand_in = folder / "redis-server"
    stand_in.write_text("#!/bin/sh\n")
    stand_in.chmod(0o755)
    given = {"HERMES_NAMESPACE": "t*", "HERMES_PASSWORD": password, "RAY_PASSWORD": "r"}
    script = CHART.read_text().replace("/run/redis", str(folder))
    subprocess.run(["sh", "-c", script], check=True, env={**given, "PATH": f"{folder}:{os.environ['PATH']}"})
    return folder / "users.acl"


def restart(server: redis_server.RedisServer, folder: Path, acl: Path | None) -> redis_server.RedisServer:
    os.kill(server.pid, signal.SIGKILL)
    os.waitpid(server.pid, 0)
    return redis_server.start(folder, server.port, namespace="t*", acl=acl)


async def accepted(w: World, request_id: str) -> bool:
    try:
        await w.admit(request_id)
    except JournalUnavailable:
        return False
    return True


@pytest.mark.parametrize("users", ["cluster/redis.acl", "the chart"])
def test_ten_kills_lose_nothing(users: str, tmp_path: Path, namespace: str) -> None:
    folder, password = tmp_path / "data", "of-the-test"
    acl = of_the_chart(tmp_path / "chart", password) if users == "the chart" else None

    async def main() -> None:
        server = redis_server.start(folder, namespace="t*", acl=acl, password=password)
        try:
            async with world(server.url(), namespace) as w:
                writer, hub = await w.writer(), await w.hub()
                followers, attempts = [], list[Attempt]()
                for number in range(STREAMS):
                    followers.append(hub.follow_new(f"req_{number}"))
                    await w.admit(f"req_{number}")
                    attempts.append((await writer.open(f"req_{number}", 1, b"nonce-%d" % number, OPENED))[0])
                reading = [asyncio.create_task(everything(follower)) for follower in followers]
                waiting = []
                for kill in range(KILLS):
                    for attempt in attempts:
                        add(attempt, 2 * kill + 1)
                    waiting.append(f"req_waiting_{kill}")
                    await eventually(lambda: accepted(w, waiting[-1]))
                    server = await asyncio.to_thread(restart, server, folder, acl)
                    for attempt in attempts:
                        add(attempt, 2 * kill + 2)
                for attempt in attempts:
                    finish(attempt)
                assert await asyncio.gather(*reading) == [events(1, 2 * KILLS)] * STREAMS
                for request_id in waiting:
                    found = await w.store.last_id(request_id)
                    assert found is not None, f"{request_id} was accepted, and is gone"
        finally:
            processes.end(server.pid)
        assert "CRITICAL" not in (folder / "redis.log").read_text()

    asyncio.run(main())
