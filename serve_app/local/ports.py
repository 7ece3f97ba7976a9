"""Ports on the loopback, and other numbers that one process holds. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
from functools import cached_property
from pathlib import Path
from typing import BinaryIO


class Claims:
    """The numbers of one kind. When a process ends, the kernel takes back what it held, whatever
    ended it.

    A lock of `flock` would pass on to what the process forks, which may outlive it.
    """

    def __init__(self, kind: str) -> None:
        # Not TMPDIR: two runs on one machine may have two.
        self._path = Path("/tmp") / f"hermes-{kind}-{os.getuid()}"
        self._mine: set[int] = set()

    def take(self, number: int) -> bool:
        """Hold a number from now on; false if any process, this one included, holds it already."""
        if number in self._mine:
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except (BlockingIOError, PermissionError):
            return False
        self._mine.add(number)
        return True

    def give_back(self, number: int) -> None:
        """Hold it no longer."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, number)
        self._mine.remove(number)

    @cached_property
    def _file(self) -> BinaryIO:
        return self._path.open("ab")  # opened once: closing it anywhere would release every number


_CLAIMS = Claims("ports")


def free_port() -> int:
    """A port on the loopback that nobody listens on at the moment, and that no later call returns
    while this process lives, whichever process makes that call.

    It is below the range for outgoing connections. In that range, a client that keeps trying to
    reach a stopped server can connect to itself, and would then occupy the server's port.
    """
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if _CLAIMS.take(port):
                return port


def is_taken(port: int) -> bool:
    """Whether a process listens on a loopback port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
