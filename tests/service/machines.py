"""Machines as operators have them: hosts of a network, each with a home and a shell, and a Redis
beside them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from serve_app.local import processes, ray_cluster, redis_server
from serve_app.local.environment import ROOT
from tests.service.network import Host, Network
from tests.service.services import let_in

BIN = ROOT / ".venv" / "bin"
SCRIPT = str(ROOT / "cluster" / "ray-start")


@dataclass
class Machine:
    """A host with a home, and what its operator has exported."""

    host: Host
    home: Path
    exported: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return self.host.address

    def run(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the operator's shell."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.home.mkdir(exist_ok=True)
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        full = {
            **own,
            "PATH": f"{BIN}:{own['PATH']}",
            "HOME": str(self.home),
            "RAY_TMPDIR": str(self.folder),
            "HERMES_STATE": str(self.folder),
            "RAY_prestart_worker_first_driver": "0",
            **self.exported,
            **more,
        }
        return subprocess.run(
            [*self.host.prefix, *words],
            env=full,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def ok(self, *words: str, **more: str) -> str:
        done = self.run(*words, **more)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def start(self, role: str, *options: str) -> str:
        """Run `cluster/ray-start`; the machine has no route by which Ray could find its own
        address.
        """
        place = [] if role == "alone" else ["--node-ip-address", self.address]
        if role == "node":
            place += [
                "--temp-dir",
                str(self.folder / "ray"),
            ]  # else the head's, where machines share a disk
        return self.ok(
            SCRIPT, role, *options, *place, "--object-store-memory", str(128 * 1024 * 1024)
        )

    @property
    def folder(self) -> Path:
        return ray_cluster.short_folder(self.home)

    def listening(self) -> set[tuple[str, str, int]]:
        """Process, address and port of everything that listens outside of the loopback."""
        lines = self.ok(
            "ss", "--listening", "--tcp", "--numeric", "--processes", "--no-header"
        ).splitlines()
        found = set()
        for _, _, _, local, _, process in (line.split(maxsplit=5) for line in lines):
            address, port = local.rsplit(":", 1)
            if not address.strip("[]").removeprefix("::ffff:").startswith("127."):
                found.add((process.split('"')[1], address, int(port)))
        return found

    def down(self) -> None:
        self.host.kill()
        ray_cluster.sweep(self.home)


@contextmanager
def hosts(folder: Path, count: int) -> Iterator[list[Machine]]:
    """Machines on a network, with a Redis that uses the files that the project ships."""
    folder.mkdir(parents=True, exist_ok=True)
    let_in(folder, "acme")
    network = Network(3, count)
    network.up()
    made = [Machine(host, folder / host.name) for host in network.hosts]
    try:
        redis = redis_server.start(folder / "redis", bind=network.gateway)
        for machine in made:
            machine.exported = {
                "HERMES_REDIS_URL": redis.url(),
                "HERMES_KEYS_FILE": str(folder / "keys"),
                "HERMES_GCS_REDIS": f"{network.gateway}:{redis.port}",
                "HERMES_GCS_REDIS_PASSWORD": redis.password,
            }
        try:
            yield made
        finally:
            for machine in made:
                machine.down()
            processes.end(redis.pid)
    finally:
        network.down()
        for host in (
            network.hosts
        ):  # the kernel may keep a namespace, and so this end of its wire, for minutes
            subprocess.run(["ip", "link", "del", host.wire], capture_output=True, check=False)
