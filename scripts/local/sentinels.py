"""Three Redis and a Sentinel beside each, configured as `helm/redis-ha.yaml` configures them on
Kubernetes, with the users that the chart's own script writes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from redis import Redis
from redis.exceptions import RedisError

from scripts.local import environment, ports, processes, redis_server
from scripts.local.environment import ROOT

VALUES = ROOT / "helm" / "redis-ha.yaml"
USERS = ROOT / "helm" / "hermes-serve" / "files" / "redis-users.sh"
_OF_THE_CONTAINER = ("aclfile", "maxmemory", "repl-backlog-size")
_WITHIN_S = 60.0


class Sentinels:
    """`url` names the Sentinels; `ports_of` are the servers' own, by number."""

    def __init__(
        self,
        folder: Path,
        namespace: str = "hermes",
        settings: Mapping[str, object] | None = None,
        announced: Callable[[int], int] = lambda port: port,
    ) -> None:
        """Start all six.

        Args:
            settings: lines of the servers' configuration that replace the chart's.
            announced: the port under which others should know a server's port, see `wire`.
        """
        self._folder = folder
        self._values: Any = yaml.safe_load(VALUES.read_text())
        self._group: str = self._values["redis"]["masterGroupName"]
        self._passwords = {name: os.urandom(12).hex() for name in ("hermes", "default", "sentinel")}
        self._acl = self._users(namespace)
        self._settings = {
            name: value
            for name, value in self._values["redis"]["config"].items()
            if name not in _OF_THE_CONTAINER
        } | dict(settings or {})
        self._announced = announced
        self._pids: dict[int, int] = {}
        self.ports_of = [ports.free_port() for _ in range(self._values["replicas"])]
        self._sentinels: list[int] = []
        try:
            for number in range(len(self.ports_of)):
                self._serve(number, self.ports_of[0])
            for number in range(len(self.ports_of)):
                self._sentinels.append(self._watch(number))
            self._until(self._is_whole)
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        """For the service's user."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._sentinels)
        password, asked = self._passwords["hermes"], self._passwords["sentinel"]
        return (
            f"redis+sentinel://hermes:{password}@{hosts}/{self._group}/0?sentinel_password={asked}"
        )

    def primary(self) -> int:
        """The port of the server that the Sentinels take for the primary, and that agrees."""
        for _ in self._seconds():
            try:
                with self._sentinel(self._sentinels[-1]) as sentinel:
                    _, port = sentinel.sentinel_get_master_addr_by_name(self._group)
                found = next(own for own in self.ports_of if self._announced(own) == port)
                with self.server(found) as server:
                    if server.role()[0] == "master":
                        return found
            except RedisError:
                continue
        raise RuntimeError("no primary")

    def server(self, port: int) -> Any:
        """A client of one server that may do everything."""
        login: dict[str, Any] = {"username": "default", "password": self._passwords["default"]}
        return Redis(port=port, **login, protocol=2, decode_responses=True, socket_timeout=5)

    def kill(self, port: int) -> None:
        """Kill a server, without a shutdown."""
        pid = self._pids.pop(port)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def replicas_are_cut_off(self, from_port: int) -> None:
        """Wait until the replicas have read all that a dead primary had sent to them."""
        for port in self.ports_of:
            if port != from_port:
                with self.server(port) as server:
                    self._until(partial(_is_cut_off, server))

    def until_failed_over(self, from_port: int) -> int:
        """Wait until another server is the primary. Returns its port."""
        self._until(lambda: self.primary() != from_port)
        return self.primary()

    def all_back(self) -> int:
        """Start what is dead as a replica of the primary, and wait until everybody knows it.
        Returns the primary's port.
        """
        for number, port in enumerate(self.ports_of):
            if port not in self._pids:
                self._serve(number, self.primary())
        self._until(self._is_whole)
        return self.primary()

    def stop(self) -> None:
        """Kill all of them: at SIGTERM, a primary waits up to ten seconds for its replicas."""
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)
            processes.reap(pid)
        self._pids.clear()

    @property
    def first_sentinel(self) -> int:
        """The pid of the Sentinel that `url` names first."""
        return self._pids[self._sentinels[0]]

    def _users(self, namespace: str) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        script = USERS.read_text().replace("/run/redis", str(self._folder))
        given = {
            "PATH": os.environ["PATH"],
            "HERMES_NAMESPACE": namespace,
            "HERMES_PASSWORD": self._passwords["hermes"],
            "RAY_PASSWORD": self._passwords["hermes"],
            "REPLICATION_PASSWORD": self._passwords["default"],
        }
        subprocess.run(["sh", "-c", script], env=given, check=True)
        return self._folder / "users.acl"

    def _serve(self, number: int, primary: int) -> None:
        """Start a server with what the chart's own script adds to the configuration."""
        port = self.ports_of[number]
        own: dict[str, object] = {
            "requirepass": self._passwords["default"],
            "masterauth": self._passwords["default"],
            "replica-announce-ip": "127.0.0.1",
            "replica-announce-port": self._announced(port),
        }
        if port != primary:
            own["replicaof"] = f"127.0.0.1 {self._announced(primary)}"
        folder = self._folder / f"redis-{number}"
        server = redis_server.start(folder, port, acl=self._acl, settings={**self._settings, **own})
        self._pids[port] = server.pid

    def _watch(self, number: int) -> int:
        """Start a Sentinel. Returns its port."""
        server, port = environment.find_redis_server(), ports.free_port()
        assert server is not None
        watched = [
            f"port {port}\nbind 127.0.0.1\ndir {self._folder}\n"
            f"requirepass {self._passwords['sentinel']}\n"
            f"sentinel sentinel-pass {self._passwords['sentinel']}\n"
            f"sentinel monitor {self._group} 127.0.0.1 {self._announced(self.ports_of[0])} "
            f"{self._values['sentinel']['quorum']}\n"
            f"sentinel auth-pass {self._group} {self._passwords['default']}\n"
        ]
        for name, value in self._values["sentinel"]["config"].items():
            place = "" if name == "maxclients" else f"sentinel {name} {self._group} "
            watched.append(f"{place or name} {value}\n")
        folder = self._folder / f"sentinel-{number}"
        folder.mkdir()
        (folder / "conf").write_text("".join(watched))
        command = [server, str(folder / "conf"), "--sentinel"]
        self._pids[port] = processes.start(command, folder / "log", os.environ, folder)
        return port

    def _sentinel(self, port: int) -> Any:
        return Redis(port=port, password=self._passwords["sentinel"], protocol=2, socket_timeout=5)

    def _is_whole(self) -> bool:
        """Whether every replica has what the primary has, and every Sentinel knows everybody."""
        others = len(self.ports_of) - 1
        try:
            with self.server(self.primary()) as server:
                if server.info("replication")["connected_slaves"] != others:
                    return False
            for port in self._sentinels:
                with self._sentinel(port) as sentinel:
                    state = sentinel.sentinel_masters()[self._group]
                    healthy = [
                        replica
                        for replica in sentinel.sentinel_slaves(self._group)
                        if replica["flags"] == "slave" and replica["master-link-status"] == "ok"
                    ]
                known = (len(healthy), state["num-other-sentinels"])
                if known != (others, others) or state["flags"] != "master":
                    return False
        except (RedisError, RuntimeError):
            return False
        return True

    def _until(self, condition: Callable[[], bool]) -> None:
        for _ in self._seconds():
            if condition():
                return
        raise RuntimeError("the Sentinels do not come to rest")

    @staticmethod
    def _seconds() -> Any:
        deadline = time.monotonic() + _WITHIN_S
        while time.monotonic() < deadline:
            yield
            time.sleep(0.05)


def _is_cut_off(replica: Any) -> bool:
    return bool(replica.info("replication").get("master_link_status") != "up")
