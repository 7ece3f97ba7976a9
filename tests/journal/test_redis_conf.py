"""`cluster/redis.conf` and `cluster/redis.acl` as an operator uses them; all tests use them too,
through `redis_server`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import AuthenticationError, NoPermissionError

from serve_app.local import processes, redis_server
from serve_app.local.environment import ROOT
from tests.journal.journal_helpers import until_written
from tests.tables import each


@pytest.fixture
def server(tmp_path: Path) -> Iterator[redis_server.RedisServer]:
    made = redis_server.start(tmp_path)
    yield made
    if processes.is_alive(made.pid):
        processes.end(made.pid)


def as_user(server: redis_server.RedisServer, user: str = "hermes") -> Redis:
    return Redis.from_url(server.url(user), protocol=2)


def test_redis_starts_with_the_files_that_the_project_ships(
    server: redis_server.RedisServer,
) -> None:
    wanted = {"appendonly": "yes", "maxmemory-policy": "noeviction", "appendfsync": "everysec"}
    with as_user(server, "operator") as redis:
        assert {name: redis.config_get(name)[name] for name in wanted} == wanted


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


Refused = Callable[[Redis], object]
REFUSED: list[tuple[str, str, Refused]] = [
    ("hermes", "restores what it made elsewhere", lambda r: r.restore("hermes:a", 0, b"x")),
    ("hermes", "sends keys away", lambda r: r.migrate("127.0.0.1", 1, ["hermes:a"], 0, 1)),
    ("hermes", "ends connections", lambda r: r.client_kill_filter(_type="pubsub")),
    ("hermes", "makes everybody wait", lambda r: r.client_pause(1)),
    ("hermes", "lists everybody's keys", lambda r: r.scan()),
    ("hermes", "empties the server", lambda r: r.flushall()),
    ("hermes", "reads Ray's keys", lambda r: r.hget("RAYabc@JOB", "k")),
    ("hermes", "reads another's keys", lambda r: r.get("other:key")),
    ("hermes", "writes to others", lambda r: r.publish("other:w", "x")),
    ("hermes", "reads the configuration", lambda r: r.config_get("*")),
    ("hermes", "lists the users", lambda r: r.acl_list()),
    ("hermes", "ends the server", lambda r: r.shutdown()),
    ("hermes", "makes a replica of it", lambda r: r.replicaof("NO", "ONE")),
    ("ray", "reads a journal", lambda r: r.xrange("hermes:j:1")),
    ("ray", "lists everybody's keys", lambda r: r.keys("*")),
    ("ray", "walks over everybody's keys", lambda r: r.scan()),
]


@each("user, what, command", REFUSED)
def test_no_user_reaches_more_than_it_needs(
    server: redis_server.RedisServer, user: str, what: str, command: Refused
) -> None:
    with as_user(server, user) as redis, pytest.raises(NoPermissionError):
        command(redis)


@each("login", [{}, {"username": "default", "password": ""}])
def test_nobody_logs_in_without_a_password(
    server: redis_server.RedisServer, login: dict[str, str]
) -> None:
    with (
        Redis(port=server.port, protocol=2, **login) as nobody,  # type: ignore[arg-type]
        pytest.raises(AuthenticationError),
    ):
        nobody.ping()


def test_the_template_keeps_its_place_for_the_password() -> None:
    assert (ROOT / "cluster" / "redis.acl").read_text().count(
        "REPLACE_WITH_SHA256_OF_THE_PASSWORD"
    ) == 2
