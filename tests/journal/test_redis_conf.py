"""`cluster/redis.conf` and `cluster/redis.acl`, as an operator starts them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from scripts.local import processes, redis_server
from scripts.local.environment import ROOT

PASSWORD = "a password of the test's own"


def test_redis_starts_with_the_files_that_the_project_ships(tmp_path: Path) -> None:
    server = redis_server.find_server()
    assert server is not None
    digest = hashlib.sha256(PASSWORD.encode()).hexdigest()
    acl = (ROOT / "cluster" / "redis.acl").read_text().replace("REPLACE_WITH_SHA256_OF_THE_PASSWORD", digest)
    (tmp_path / "acl").write_text(f"{acl}user keeper on #{digest} ~* &* +@all\n")
    port = processes.free_port()
    own = {"port": port, "dir": tmp_path, "aclfile": tmp_path / "acl"}
    text = (ROOT / "cluster" / "redis.conf").read_text()
    for name, value in own.items():
        text, places = re.subn(rf"^{name} .*$", f"{name} {value}", text, flags=re.MULTILINE)
        assert places == 1
    (tmp_path / "redis.conf").write_text(text)
    pid = processes.start([server, str(tmp_path / "redis.conf")], tmp_path / "log", {}, tmp_path)
    try:
        with Redis(port=port, username="keeper", password=PASSWORD, protocol=2) as redis:
            while processes.is_alive(pid):
                try:
                    if redis.ping():
                        break
                except RedisError:
                    continue
            assert processes.is_alive(pid), (tmp_path / "log").read_text()
            wanted = {"appendonly": "yes", "maxmemory-policy": "noeviction", "appendfsync": "everysec"}
            assert {name: redis.config_get(name)[name] for name in wanted} == wanted
    finally:
        processes.end(pid)
