"""`cluster/redis.conf` and `cluster/redis.acl` as an operator uses them; all tests use them too,
through `redis_server`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import AuthenticationError, NoPermissionError

from scripts.local import processes, redis_server
from scripts.local.environment import ROOT
from tests.journal.journal_helpers import until_written


@pytest.fixture
def server(tmp_path: Path) -> redis_server.RedisServer:
    return redis_server.start(tmp_path)


def as_user(server: redis_server.RedisServer, user: str = "hermes") -> Redis:
    return Redis.from_url(server.url(user), protocol=2)


def test_redis_starts_with_the_files_that_the_project_ships(
    server: redis_server.RedisServer,
) -> None:
    wanted = {"appendonly": "yes", "maxmemory-policy": "noeviction", "appendfsync": "everysec"}
    with as_user(server, "operator") as redis:
        assert {name: redis.config_get(name)[name] for name in wanted} == wanted
    processes.end(server.pid)


def test_what_was_written_in_a_transaction_outlives_a_kill(
    server: redis_server.RedisServer, tmp_path: Path
) -> None:
    """Redis before 8.4 replays a transaction of the append-only file as `default`, who may log in
    nowhere.
    """
    with as_user(server) as redis, redis.pipeline(transaction=True) as transaction:
        transaction.set("hermes:a", 1)
        transaction.xadd("hermes:j:1", {"b": "c"}, id="0-1")
        transaction.execute()
    until_written(server.url("operator"))
    os.kill(server.pid, signal.SIGKILL)
    os.waitpid(server.pid, 0)
    again = redis_server.start(tmp_path, server.port)
    try:
        with as_user(again) as redis:
            assert redis.get("hermes:a") == b"1"
            assert redis.xlen("hermes:j:1") == 1
        assert "CRITICAL" not in (tmp_path / "redis.log").read_text()
    finally:
        processes.end(again.pid)


REFUSED: dict[str, tuple[str, Callable[[Redis], object]]] = {
    "the service restores what it made elsewhere": (
        "hermes",
        lambda r: r.restore("hermes:a", 0, b"x"),
    ),
    "the service sends keys to another server": (
        "hermes",
        lambda r: r.migrate("127.0.0.1", 1, ["hermes:a"], 0, 1),
    ),
    "the service ends connections": ("hermes", lambda r: r.client_kill_filter(_type="pubsub")),
    "the service makes everybody wait": ("hermes", lambda r: r.client_pause(1)),
    "the service lists everybody's keys": ("hermes", lambda r: r.scan()),
    "the service empties the server": ("hermes", lambda r: r.flushall()),
    "the service reads Ray's keys": ("hermes", lambda r: r.hget("RAYabc@JOB", "k")),
    "the service reads another's keys": ("hermes", lambda r: r.get("other:key")),
    "the service writes to others": ("hermes", lambda r: r.publish("other:w", "x")),
    "the service reads the configuration": ("hermes", lambda r: r.config_get("*")),
    "the service lists the users": ("hermes", lambda r: r.acl_list()),
    "the service ends the server": ("hermes", lambda r: r.shutdown()),
    "the service makes a replica of it": ("hermes", lambda r: r.replicaof("NO", "ONE")),
    "Ray reads a journal": ("ray", lambda r: r.xrange("hermes:j:1")),
    "Ray lists everybody's keys": ("ray", lambda r: r.keys("*")),
    "Ray walks over everybody's keys": ("ray", lambda r: r.scan()),
}


def test_no_user_reaches_more_than_it_needs(server: redis_server.RedisServer) -> None:
    try:
        for what, (user, command) in REFUSED.items():
            with as_user(server, user) as redis:
                try:
                    command(redis)
                except NoPermissionError:
                    continue
                pytest.fail(what)
        with Redis(port=server.port, protocol=2) as nobody, pytest.raises(AuthenticationError):
            nobody.ping()
        default = Redis(port=server.port, username="default", password="", protocol=2)
        with default as nobody, pytest.raises(AuthenticationError):
            nobody.ping()
    finally:
        processes.end(server.pid)


def test_the_template_keeps_its_place_for_the_password() -> None:
    assert (ROOT / "cluster" / "redis.acl").read_text().count(
        "REPLACE_WITH_SHA256_OF_THE_PASSWORD"
    ) == 2
