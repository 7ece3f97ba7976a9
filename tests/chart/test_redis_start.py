"""The chart's start script as a process: what it starts again, and what it leaves to others."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.exceptions import RedisError

from serve_app.local import processes
from tests.chart.chart_redis import ChartRedis
from tests.waiting import until


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[ChartRedis]:
    """Not started yet."""
    made = ChartRedis(tmp_path / "redis")
    yield made
    if made.pid:
        processes.end(made.pid)


def answers(redis: ChartRedis) -> bool:
    try:
        with redis.client as client:
            return bool(client.ping())
    except (RedisError, OSError):
        return False


def is_up(redis: ChartRedis) -> None:
    until("Redis answers", lambda: answers(redis))


def is_killed_and_back(redis: ChartRedis) -> None:
    server = redis.server()
    os.kill(server, signal.SIGKILL)
    until("another process", lambda: redis.server() not in (0, server) and answers(redis))


def ended(redis: ChartRedis) -> int:
    """The script's exit status."""

    def collected() -> tuple[int, int] | None:
        found = os.waitpid(redis.pid, os.WNOHANG)
        return None if found == (0, 0) else found

    _, status = until(f"the script ends ({redis.log})", collected)
    redis.pid = 0
    return os.waitstatus_to_exitcode(status)


def test_a_redis_that_is_killed_while_it_rewrites_its_file_leaves_nothing_on_the_volume(
    redis: ChartRedis,
) -> None:
    def unfinished() -> set[Path]:
        return set(redis.data.glob("temp-*"))

    # A rewrite takes 3 ms a key, and so does not end before it is interrupted.
    redis.configure("rdb-key-save-delay 3000\nauto-aof-rewrite-min-size 1mb\n")
    redis.start()
    is_up(redis)
    with redis.client as client, client.pipeline(transaction=False) as pipeline:
        for number in range(10_000):
            pipeline.set(f"prod:{number}", "x" * 1000)
        pipeline.execute()
    left = until("a rewrite", unfinished)
    is_killed_and_back(redis)
    assert not left & unfinished(), "the next rewrite, if there is one already, has its own"


def test_a_redis_that_is_killed_at_every_start_is_left_to_the_kubelet(redis: ChartRedis) -> None:
    redis.start()
    for _ in range(5):
        server = until("a start", redis.server)
        os.kill(server, signal.SIGKILL)
        until("its end", lambda: redis.server() != server)  # noqa: B023
    assert ended(redis) == 128 + signal.SIGKILL
    assert "killed 5 times, each time less than 60 s after its start" in redis.log.read_text()


def test_a_pod_that_is_deleted_ends_redis_and_nothing_comes_back(redis: ChartRedis) -> None:
    redis.start()
    is_up(redis)
    server = redis.server()
    os.kill(redis.pid, signal.SIGTERM)
    assert ended(redis) == 0
    assert not processes.is_alive(server)
    assert "Redis is now ready to exit" in redis.log.read_text()


def test_a_redis_that_begins_and_loses_the_signal_gets_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shell's child has no handler of its own yet when it has just been forked."""
    (tmp_path / "redis-server").write_text(
        "#!/bin/sh\ntrap 'trap \"exit 0\" TERM; touch lost' TERM\ntouch began\n"
        "for _ in $(seq 6000); do sleep 0.05; done\nexit 1\n"
    )
    (tmp_path / "redis-server").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    redis = ChartRedis(tmp_path / "redis")
    redis.start()
    until("it begins", (tmp_path / "redis" / "began").exists)
    os.kill(redis.pid, signal.SIGTERM)
    assert ended(redis) == 0
    assert (tmp_path / "redis" / "lost").exists()


def test_a_redis_that_ends_by_itself_ends_the_container(redis: ChartRedis) -> None:
    redis.configure("dir /no/such\n")
    redis.start()
    assert ended(redis) == 1
    assert "starting it again" not in redis.log.read_text()


def probed(redis: ChartRedis, name: str) -> bool:
    return subprocess.run(redis.probe(name), capture_output=True).returncode == 0


def test_a_redis_that_loads_is_alive_and_not_ready(redis: ChartRedis) -> None:
    assert not probed(redis, "livenessProbe"), "nobody answers"
    redis.start()
    is_up(redis)
    with redis.client as client:
        client.eval("for n = 1, 20000 do redis.call('SET', KEYS[1] .. n, 1) end", 1, "prod:")
    redis.configure("key-load-delay 5000\n")  # 5 ms a key: it loads until it is killed again
    os.kill(redis.server(), signal.SIGKILL)
    until("it is alive", lambda: probed(redis, "livenessProbe"))
    assert not probed(redis, "readinessProbe"), "it still loads"
    redis.configure("key-load-delay 0\n")
    os.kill(redis.server(), signal.SIGKILL)
    until("it is ready", lambda: probed(redis, "readinessProbe"))
    assert probed(redis, "livenessProbe")


def test_a_redis_whose_volume_is_full_is_alive_and_not_ready(redis: ChartRedis) -> None:
    redis.start()
    is_up(redis)
    resource.prlimit(redis.server(), resource.RLIMIT_FSIZE, (100_000, 100_000))
    with redis.client as client:
        client.set("prod:0", "x" * 150_000)
        assert probed(redis, "livenessProbe")
        assert not probed(redis, "readinessProbe")
        assert client.strlen("prod:0") == 150_000
