"""Ports on the loopback. Standard library only."""

from __future__ import annotations

import contextlib
import random
import socket

from scripts.local.claims import Claims

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
