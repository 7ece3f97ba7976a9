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

from scripts.local import processes


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
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]

    def kill(self) -> None:
        """Cut the power: `kill -9` for everything, repeated for processes that started
        meanwhile.
        """
        while alive := [pid for pid in self.pids() if processes.is_alive(pid)]:
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def cut(self) -> None:
        """Unplug the network cable: packets vanish silently."""
        _ip("link", "set", self.wire, "down")

    def mend(self) -> None:
        """Plug the cable in again."""
        _ip("link", "set", self.wire, "up")


class Network:
    """A bridge with `hosts` hosts; this machine is connected too, at `gateway`."""

    def __init__(self, number: int, hosts: int) -> None:
        self._bridge = f"hermes{number}"
        self.gateway = f"10.213.{number}.1"
        self.hosts = [
            Host(f"hermes{number}-{n}", f"10.213.{number}.{10 + n}", f"hermes{number}-{n}")
            for n in range(hosts)
        ]

    def up(self) -> None:
        """Create it."""
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{self.gateway}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for host in self.hosts:
                _ip("netns", "add", host.name)
                _ip(
                    "link",
                    "add",
                    host.wire,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "eth0",
                    "netns",
                    host.name,
                )
                _ip("link", "set", host.wire, "master", self._bridge, "up")
                inside = ("-n", host.name)
                _ip(*inside, "link", "set", "lo", "up")
                _ip(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
                _ip(*inside, "link", "set", "eth0", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            self.down()
            told = (
                error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
            )
            raise RuntimeError(f"network namespaces cannot be made here: {told}") from None

    def down(self) -> None:
        """Stop everything on the hosts, and remove them."""
        for host in self.hosts:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                host.kill()
                _ip("netns", "del", host.name)
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                _ip(
                    "link", "del", host.wire
                )  # the kernel may keep a namespace, and the wire with it, for minutes
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            _ip("link", "del", self._bridge)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
