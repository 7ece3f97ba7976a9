"""`cluster/redis.conf` and `cluster/redis.acl`, as an operator starts them."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from scripts.local import processes, redis_server
from scripts.local.environment import ROOT

PASSWORD = "a password of the test's own"


@contextmanager
def shipped(folder: Path, password: str, bind: str = "127.0.0.1", more: str = "") -> Iterator[int]:
    """Redis on the files that the project ships, on a port of its own. `more`: lines behind the users."""
    server = redis_server.find_server()
    assert server is not None
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(password.encode()).hexdigest()
    acl = (ROOT / "cluster" / "redis.acl").read_text() + more
    (folder / "acl").write_text(acl.replace("REPLACE_WITH_SHA256_OF_THE_PASSWORD", digest))
    port = processes.free_port()
    own = {"port": port, "bind": bind, "dir": folder, "aclfile": folder / "acl"}
    text = (ROOT / "cluster" / "redis.conf").read_text()
    for name, value in own.items():
        text, places = re.subn(rf"^{name} .*$", f"{name} {value}", text, flags=re.MULTILINE)
        assert places == 1
    (folder / "redis.conf").write_text(text)
    pid = processes.start([server, str(folder / "redis.conf")], folder / "log", {}, folder)
    try:
        with Redis(host=bind, port=port, username="hermes", password=password, protocol=2) as redis:
            while not answers(redis):
                assert processes.is_alive(pid), (folder / "log").read_text()
                time.sleep(0.05)
        yield port
    finally:
        processes.end(pid)


def answers(redis: Redis) -> bool:
    try:
        return bool(redis.ping())
    except RedisError:
        return False


def test_redis_starts_with_the_files_that_the_project_ships(tmp_path: Path) -> None:
    keeper = "user keeper on #REPLACE_WITH_SHA256_OF_THE_PASSWORD ~* &* +@all\n"
    with (
        shipped(tmp_path, PASSWORD, more=keeper) as port,
        Redis(port=port, username="keeper", password=PASSWORD, protocol=2) as redis,
    ):
        wanted = {"appendonly": "yes", "maxmemory-policy": "noeviction", "appendfsync": "everysec"}
        assert {name: redis.config_get(name)[name] for name in wanted} == wanted
