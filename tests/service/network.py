"""Hosts on one machine: network namespaces on a bridge, each with its own address. Needs Linux and
root.

Traffic that would cross a real network crosses a virtual wire here, which can be cut.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass

from serve_app.local import processes
from tests import runs
from tests.runs import ip


@dataclass(frozen=True)
class Host:
    """One namespace. `prefix`: put it before a command to run the command there."""

    name: str
    address: str
    wire: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """The prefix of commands that run on this host."""
        return ("ip", "netns", "exec", self.name)

    def pids(self) -> list[int]:
        """The pids of everything that runs on this host."""
        return [int(pid) for pid in ip("netns", "pids", self.name).split()]

    def kill(self) -> None:
        """Cut the power: `kill -9` for everything, repeated for processes that started
        meanwhile. Its memory forgets what they shared.
        """
        shared: set[str] = set()
        while alive := [pid for pid in self.pids() if processes.is_alive(pid)]:
            shared |= processes.shared_memory(alive)
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        processes.forget_shared_memory(shared)

    def cut(self) -> None:
        """Unplug the network cable: packets vanish silently."""
        ip("link", "set", self.wire, "down")

    def mend(self) -> None:
        """Plug the cable in again."""
        ip("link", "set", self.wire, "up")


class Network:
    """A bridge with `hosts` hosts; this machine is connected too, at `gateway`. No other run has
    its names and addresses, nor has another `number` of this one.
    """

    def __init__(self, number: int, hosts: int) -> None:
        self._bridge = f"hermes{runs.number()}-{number}"
        subnet = f"10.{212 + number}.{runs.number()}"
        self.gateway = f"{subnet}.1"
        self.hosts = [
            Host(f"{self._bridge}-{n}", f"{subnet}.{10 + n}", f"{self._bridge}-{n}")
            for n in range(hosts)
        ]
        self._undo = contextlib.ExitStack()

    def up(self) -> None:
        """Create it."""
        try:
            self._make("link", self._bridge, "type", "bridge")
            ip("addr", "add", f"{self.gateway}/24", "dev", self._bridge)
            ip("link", "set", self._bridge, "up")
            for host in self.hosts:
                self._make("netns", host.name)
                self._undo.callback(host.kill)
                # The kernel may keep a namespace, and so the wire, for minutes: it is removed, too.
                wire = ("type", "veth", "peer", "name", "eth0", "netns", host.name)
                self._make("link", host.wire, *wire)
                ip("link", "set", host.wire, "master", self._bridge, "up")
                inside = ("-n", host.name)
                ip(*inside, "link", "set", "lo", "up")
                ip(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
                ip(*inside, "link", "set", "eth0", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            self.down()
            told = (
                error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
            )
            raise RuntimeError(f"network namespaces cannot be made here: {told}") from None

    def down(self) -> None:
        """Stop everything on the hosts that were made, and remove what was made."""
        self._undo.close()

    def _make(self, kind: str, name: str, *more: str) -> None:
        ip(kind, "add", name, *more)
        self._undo.callback(_remove, kind, name)


def _remove(kind: str, name: str) -> None:
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        ip(kind, "del", name)
