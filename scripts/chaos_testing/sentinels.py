"""Three Redis and a Sentinel beside each, with the settings of `helm/redis-ha.yaml`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from redis import Redis
from redis.exceptions import RedisError

from serve_app.local import environment, ports, processes, redis_server
from serve_app.local.environment import ROOT

_OF_THE_CONTAINER = ("aclfile", "maxmemory", "repl-backlog-size")
_OF_SERVERS, _OF_SENTINELS = "servers-password", "sentinels-password"
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
            announced: the port under which others should know a server's port.
        """
        values: Any = yaml.safe_load((ROOT / "helm" / "redis-ha.yaml").read_text())
        config: Any = values["redis"]["config"]
        own = {"masteruser": "operator", "masterauth": _OF_SERVERS}
        self._settings = {k: v for k, v in config.items() if k not in _OF_THE_CONTAINER}
        self._settings |= {**own, "replica-announce-ip": "127.0.0.1", **(settings or {})}
        self._group: str = values["redis"]["masterGroupName"]
        self._folder, self._namespace, self._announced = folder, namespace, announced
        self._pids: dict[int, int] = {}
        self.ports_of = [ports.free_port() for _ in range(values["replicas"])]
        self._sentinels = [ports.free_port() for _ in self.ports_of]
        try:
            for port in self.ports_of:
                self._serve(port, self.ports_of[0])
            for port in self._sentinels:
                self._watch(port, values["sentinel"])
            self._until(self._is_whole)
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._sentinels)
        asked = f"sentinel_password={_OF_SENTINELS}"
        return f"redis+sentinel://hermes:{_OF_SERVERS}@{hosts}/{self._group}/0?{asked}"

    @property
    def first_sentinel(self) -> int:
        """The pid of the Sentinel that `url` names first."""
        return self._pids[self._sentinels[0]]

    def server(self, port: int, decode_responses: bool = True) -> Any:
        """A client of one server that may do everything."""
        login: Any = {"username": "operator", "password": _OF_SERVERS, "protocol": 2}
        return Redis(port=port, **login, decode_responses=decode_responses, socket_timeout=5)

    def primary(self) -> int:
        """The port of the server that the Sentinels take for the primary, and that agrees."""
        self._until(lambda: self._primary() != 0)
        return self._primary()

    def kill(self, port: int) -> None:
        pid = self._pids.pop(port)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def replicas_are_cut_off(self, from_port: int) -> None:
        """Wait until the replicas have read all that a dead primary had sent to them."""

        def cut_off(port: int) -> bool:
            with self.server(port) as server:
                return bool(server.info("replication").get("master_link_status") != "up")

        self._until(lambda: all(cut_off(port) for port in self.ports_of if port != from_port))

    def until_failed_over(self, from_port: int) -> int:
        """Wait until another server is the primary. Returns its port."""
        self._until(lambda: self._primary() not in (0, from_port))
        return self.primary()

    def all_back(self) -> int:
        """Start what is dead as a replica of the primary, and wait until everybody knows it.
        Returns the primary's port.
        """
        for port in self.ports_of:
            if port not in self._pids:
                self._serve(port, self.primary())
        self._until(self._is_whole)
        return self.primary()

    def stop(self) -> None:
        """Kill all of them: at SIGTERM, a primary waits up to ten seconds for its replicas."""
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)
            processes.reap(pid)
        self._pids.clear()

    def _serve(self, port: int, primary: int) -> None:
        own: dict[str, object] = {"replica-announce-port": self._announced(port)}
        if port != primary:
            own["replicaof"] = f"127.0.0.1 {self._announced(primary)}"
        folder, settings = self._folder / str(port), {**self._settings, **own}
        server = redis_server.start(
            folder, port, namespace=self._namespace, settings=settings, password=_OF_SERVERS
        )
        self._pids[port] = server.pid

    def _watch(self, port: int, values: Any) -> None:
        server, folder = environment.find_redis_server(), self._folder / str(port)
        assert server is not None
        primary = f"127.0.0.1 {self._announced(self.ports_of[0])} {values['quorum']}"
        lines = [
            f"port {port}\nbind 127.0.0.1\ndir {folder}\nrequirepass {_OF_SENTINELS}",
            f"sentinel sentinel-pass {_OF_SENTINELS}",
            f"sentinel monitor {self._group} {primary}",
            f"sentinel auth-user {self._group} operator",
            f"sentinel auth-pass {self._group} {_OF_SERVERS}",
        ]
        for name, value in values["config"].items():
            place = name if name == "maxclients" else f"sentinel {name} {self._group}"
            lines.append(f"{place} {value}")
        folder.mkdir()
        (folder / "conf").write_text("\n".join(lines) + "\n")
        command = [server, str(folder / "conf"), "--sentinel"]
        self._pids[port] = processes.start(command, folder / "log", os.environ, folder)

    def _sentinel(self, port: int) -> Any:
        return Redis(port=port, password=_OF_SENTINELS, protocol=2, socket_timeout=5)

    def _primary(self) -> int:
        """See `primary`; 0 while there is none."""
        with self._sentinel(self._sentinels[-1]) as sentinel:
            _, port = sentinel.sentinel_get_master_addr_by_name(self._group)
        found = next(own for own in self.ports_of if self._announced(own) == port)
        with self.server(found) as server:
            return found if server.role()[0] == "master" else 0

    def _is_whole(self) -> bool:
        """Whether every Sentinel knows everybody, and every replica has what the primary has."""
        others = len(self.ports_of) - 1
        for port in self._sentinels:
            with self._sentinel(port) as sentinel:
                state = sentinel.sentinel_masters()[self._group]
                linked = [
                    replica["flags"] == "slave" and replica["master-link-status"] == "ok"
                    for replica in sentinel.sentinel_slaves(self._group)
                ]
            known = (state["flags"], state["num-other-sentinels"], sum(linked))
            if known != ("master", others, others):
                return False
        return True

    @staticmethod
    def _until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _WITHIN_S
        while time.monotonic() < deadline:
            try:
                if condition():
                    return
            except RedisError:
                pass  # one of them is dead, or starts
            time.sleep(0.05)
        raise RuntimeError("the Sentinels do not come to rest")
