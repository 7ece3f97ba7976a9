"""The users of the chart's Redis, on a real Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError
from redis.retry import Retry

from serve_app.local import processes, redis_server
from tests.chart.test_redis import PASSWORDS, users
from tests.tables import each

LOGINS = {
    "hermes": PASSWORDS["HERMES_PASSWORD"],
    "ray": PASSWORDS["RAY_PASSWORD"],
    "metrics": PASSWORDS["METRICS_PASSWORD"],
    "probe": "anything",
}


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A server with the users that the chart's own script writes."""
    folder = tmp_path_factory.mktemp("redis")
    assert users(folder, HERMES_NAMESPACE="prod", **PASSWORDS).keys() == {"default", *LOGINS}
    redis = redis_server.start(folder / "data", acl=folder / "users.acl")
    yield redis.port
    processes.end(redis.pid)


def user(port: int, name: str) -> Redis:
    return Redis(port=port, username=name, password=LOGINS[name], protocol=2, decode_responses=True)


def test_every_user_can_do_its_work(port: int) -> None:
    # The service's own rights are those of cluster/redis.acl (test_redis.py), which all tests use.
    user(port, "hermes").xadd("prod:j:1", {"a": "b"}, id="0-1")
    ray = user(port, "ray")
    ray.hset("RAYabc@JOB", "k", "v")
    ray.hscan("RAYabc@JOB")
    ray.info("cluster")
    ray.delete("DUMMY")
    user(port, "metrics").info()
    user(port, "probe").ping()


REFUSED: dict[str, tuple[str, Callable[[Redis], object]]] = {
    "Ray and a journal": ("ray", lambda r: r.xrange("prod:j:1")),
    "Ray and the configuration": ("ray", lambda r: r.config_get("*")),
    "Ray and everybody's data": ("ray", lambda r: r.flushall()),
    "Ray and a channel": ("ray", lambda r: r.publish("prod:w:1", "x")),
    "a probe and what there is": ("probe", lambda r: r.info()),
    "a probe and a value": ("probe", lambda r: r.get("prod:x")),
    "the exporter and a value": ("metrics", lambda r: r.get("prod:x")),
    "the exporter and the configuration": ("metrics", lambda r: r.config_get("*")),
}


@each("what", REFUSED)
def test_no_user_can_do_anothers(port: int, what: str) -> None:
    name, command = REFUSED[what]
    with pytest.raises(NoPermissionError):
        command(user(port, name))


def test_a_login_without_a_password_is_rejected(port: int) -> None:
    with pytest.raises(AuthenticationError):
        Redis(port=port, protocol=2, retry=Retry(NoBackoff(), 0)).ping()
