"""Redis, with each of the ACL files that the project ships, is killed again and again under 16
streams.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import pytest

from scripts.local import processes, redis_server
from scripts.local.environment import ROOT
from serve_app.errors import RedisUnavailable
from serve_app.journal.attempt import Attempt
from serve_app.redis.client import redis_call
from tests.journal.journal_helpers import OPENED, World, add, events, everything, finish, world
from tests.waiting import eventually

STREAMS, KILLS = 16, 10
CHART = ROOT / "helm" / "hermes-serve" / "files" / "redis-users.sh"


def of_the_chart(folder: Path, password: str) -> Path:
    """The ACL file that the chart's script writes."""
    folder.mkdir()
    given = {"HERMES_NAMESPACE": "t*", "HERMES_PASSWORD": password, "RAY_PASSWORD": "r"}
    script = CHART.read_text().replace("/run/redis", str(folder))
    subprocess.run(["sh", "-c", script], check=True, env={**given, "PATH": os.environ["PATH"]})
    return folder / "users.acl"


def restart(
    server: redis_server.RedisServer, folder: Path, acl: Path | None
) -> redis_server.RedisServer:
    os.kill(server.pid, signal.SIGKILL)
    os.waitpid(server.pid, 0)
    return redis_server.start(folder, server.port, namespace="t*", acl=acl)


async def accepted(w: World, request_id: str) -> bool:
    try:
        await w.admit(request_id)
    except RedisUnavailable:
        return False
    return True


async def written(w: World) -> bool:
    """Whether the append-only file holds all that was answered: under a slow fsync (`everysec`)
    Redis keeps up to two seconds of it in memory, and a kill would lose those.
    """
    found = await redis_call(lambda: w.redis.info("persistence"))
    return int(found["aof_buffer_length"]) == 0


@pytest.mark.parametrize("users", ["cluster/redis.acl", "the chart"])
async def test_ten_kills_lose_nothing(users: str, tmp_path: Path, namespace: str) -> None:
    folder, password = tmp_path / "data", "of-the-test"
    acl = of_the_chart(tmp_path / "chart", password) if users == "the chart" else None
    server = redis_server.start(folder, namespace="t*", acl=acl, password=password)
    try:
        async with world(server.url(), namespace) as w:
            writer, hub = await w.writer(), await w.hub()
            followers, attempts = [], list[Attempt]()
            for number in range(STREAMS):
                followers.append(hub.follow_new(f"req_{number}"))
                await w.admit(f"req_{number}")
                attempts.append(
                    (await writer.open(f"req_{number}", 1, b"nonce-%d" % number, OPENED))[0]
                )
            reading = [asyncio.create_task(everything(follower)) for follower in followers]
            waiting = []
            for kill in range(KILLS):
                for attempt in attempts:
                    add(attempt, 2 * kill + 1)
                waiting.append(f"req_waiting_{kill}")
                await eventually(lambda: accepted(w, waiting[-1]))
                await eventually(lambda: written(w))
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
