"""A private Redis configured like production's, with the users and settings of `cluster/redis.acl`
and `cluster/redis.conf`.

quickstart, chaos, benchmarks and tests all start Redis here, so that none of them runs a more
permissive Redis than an operator does. Only port, addresses and folders differ, and there is one
more user: `operator`, who may do everything that a person would do to a server by hand.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from serve_app.local import ports, processes
from serve_app.local.environment import CLUSTER, find_redis_server

_LOADED_WITHIN_S = 120  # loading a long append-only file on a busy machine takes long
_PLACEHOLDER = "REPLACE_WITH_SHA256_OF_THE_PASSWORD"


@dataclass(frozen=True)
class RedisServer:
    """A running server. All its users have the same password, which is in its folder."""

    pid: int
    port: int
    host: str
    password: str

    def url(self, user: str = "hermes") -> str:
        """The URL for the service's user `hermes`, for `ray` or for `operator`."""
        return f"redis://{user}:{self.password}@{self.host}:{self.port}/0"


def as_operator(url: str) -> str:
    """The URL of one of our servers, for the user who may do everything."""
    return url.replace("//hermes:", "//operator:", 1)


def port_of(folder: Path) -> int:
    """The port of the server that was started on a folder."""
    found = re.search(r"^port (\d+)$", (folder / "redis.conf").read_text(), flags=re.MULTILINE)
    assert found is not None
    return int(found[1])


def start(
    folder: Path,
    port: int | None = None,
    bind: str = "",
    namespace: str = "hermes",
    acl: Path | None = None,
    settings: Mapping[str, object] | None = None,
    password: str = "",
) -> RedisServer:
    """Start it and wait until it answers. A folder that was used before keeps its data and
    password.

    Args:
        bind: an address to listen on besides the loopback; the URL then names it.
        namespace: of the service that uses it; a glob if several do.
        acl: another file of users, without `operator`.
        settings: lines of `redis.conf` that replace or extend the shipped ones.
        password: of all users; by default a new one.

    Raises:
        RuntimeError: it did not start; the message contains the end of its log.
    """
    server = find_redis_server()
    if server is None:
        raise RuntimeError("no redis-server on PATH and none in .venv")
    folder.mkdir(parents=True, exist_ok=True)
    password = _password(folder, password)
    port = port or ports.free_port()
    users = acl or _users(folder, password, namespace)
    own = {"port": port, "bind": f"127.0.0.1 {bind}".strip(), "dir": folder, "aclfile": users}
    own["set-proc-title"] = "no"  # a title would be written over its environment
    configuration = folder / "redis.conf"
    shipped = (CLUSTER / "redis.conf").read_text()
    configuration.write_text(_with(shipped, {**own, **(settings or {})}))
    log = folder / "redis.log"
    pid = processes.start([server, str(configuration)], log, os.environ, folder)
    answers = partial(_answers, port, "" if acl else password)
    if not processes.until(answers, _LOADED_WITHIN_S, pid):
        processes.end(pid)
        raise RuntimeError(f"redis-server did not start:\n{processes.tail(log)}")
    return RedisServer(pid, port, bind or "127.0.0.1", password)


def _password(folder: Path, wanted: str) -> str:
    file = folder / "password"
    if not file.exists():
        file.touch(mode=0o600, exist_ok=False)
        file.write_text(wanted or secrets.token_urlsafe(24))
    return file.read_text()


def _users(folder: Path, password: str, namespace: str) -> Path:
    """The shipped users for another namespace, with the password's hash, and the operator."""
    text = (CLUSTER / "redis.acl").read_text().replace("hermes:*", namespace + ":*")
    file = folder / "users.acl"
    text += f"user operator on #{_PLACEHOLDER} ~* &* +@all\n"
    digest = hashlib.sha256(password.encode()).hexdigest()
    file.write_text(text.replace(_PLACEHOLDER, digest))
    return file


def _with(configuration: str, settings: Mapping[str, object]) -> str:
    """A configuration with these settings, which replace existing lines or are appended."""
    for name, value in settings.items():
        line = f"{name} {value}"
        configuration, places = re.subn(rf"^{name} .*$", line, configuration, flags=re.MULTILINE)
        if not places:
            configuration += f"{line}\n"
    return configuration


def _answers(port: int, password: str) -> bool:
    """Whether it executes commands. Without a login it answers NOAUTH even while it is still
    loading.
    """
    login = f"AUTH operator {password}\r\n" if password else ""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(f"{login}PING\r\n".encode())
            answer = connection.recv(64)
            while password and answer == b"+OK\r\n":
                answer += connection.recv(64)
            return answer.endswith(b"+PONG\r\n") or (not password and answer.startswith(b"-NOAUTH"))
    except OSError:
        return False
