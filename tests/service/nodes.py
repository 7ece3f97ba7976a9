"""A service over several Ray nodes, each on its own host: the large stages, on one machine."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from serve_app.cli.serve_api import application_status, deploy, nodes
from serve_app.local import ports, processes, ray_cluster, redis_server
from serve_app.local.ray_cluster import Place
from serve_app.local.service import Service, render, wait_ready
from tests.service.network import Host, Network
from tests.service.support import kill_all, replicas
from tests.waiting import until

PORT = 8000
STARTED = b"Ray runtime started"
"""What `ray start` says when its node has joined."""


class Nodes:
    """A head node and other nodes, on one network with Redis."""

    def __init__(self, state: Path, sizes: Sequence[tuple[int, int]], number: int = 1) -> None:
        self.network = Network(number, len(sizes))
        self.state = state
        self._sizes = sizes
        self._gcs_port = ports.free_port()
        self._environment: dict[str, str] = {}
        self._gcs_login: tuple[str, ...] = ()
        self._document: dict[str, Any] = {"applications": []}
        self._log_begins: dict[int, int] = {}
        self.service = Service(str(state), url=f"http://{self.hosts[-1].address}:{PORT}")

    @property
    def hosts(self) -> list[Host]:
        """The hosts, with the head first."""
        return self.network.hosts

    def url(self, node: int) -> str:
        """The URL of the service through one node's HAProxy."""
        return f"http://{self.hosts[node].address}:{PORT}"

    def up(self, environment: Mapping[str, str] | None = None) -> None:
        """Start network, Redis and Ray.

        Raises:
            RuntimeError: one of them could not be started; the message says why.
        """
        self.network.up()
        try:
            gateway = self.network.gateway
            redis = redis_server.start(self.state / "redis", bind=gateway)
            self.service.pids["redis"], self.service.redis_url = redis.pid, redis.url()
            self._environment = {
                "HERMES_REDIS_URL": redis.url(),
                # GCS fault tolerance: a new head finds what the old one knew.
                "RAY_REDIS_ADDRESS": f"{gateway}:{redis.port}",
                # As in the chart: nodes wait for a new head. After Ray's 60 s they would end.
                "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
                **(environment or {}),
            }
            self._gcs_login = ("--redis-username", "ray", "--redis-password", redis.password)
            self.start_head()
            for number in range(1, len(self.hosts)):
                self.start_node(number)
            self.wait_joined()
        except BaseException:
            self.down()
            raise

    def start_head(self) -> None:
        """The node with Ray's GCS and dashboard and Serve's controller; also in place of one that
        was killed.
        """
        # Ray looks for a GCS of the same address among all processes; other hosts' included.
        (ray_cluster.short_folder(self.state) / "ray" / "ray_current_cluster").unlink(
            missing_ok=True
        )
        pid, self.service.dashboard_url = ray_cluster.start(
            self.state,
            True,
            self._environment,
            place=self._place(0),
            port=self._gcs_port,
            more=self._gcs_login,
        )
        self.service.pids["ray"] = pid
        self.service.save()

    def start_node(self, number: int) -> None:
        """Start another node, or replace one that was killed; `wait_joined` waits for it."""
        log = self._log(number)
        self._log_begins[number] = log.stat().st_size if log.exists() else 0
        head = f"{self.hosts[0].address}:{self._gcs_port}"
        self.service.pids[f"node-{number}"] = ray_cluster.join(
            self.state, head, f"node-{number}", True, self._environment, self._place(number)
        )
        self.service.save()

    def wait_joined(self) -> None:
        """Wait until every node has started and Ray knows it: Serve would crowd what it deploys
        onto those that are there already. On a busy machine `ray start` gives up after 30 s, and
        Ray ends a node that was silent for too long: such nodes are started again.
        """
        until(f"every Ray node has joined; logs: {self.state}", self._all_joined, 480)

    def _all_joined(self) -> bool:
        joined = [self._joined(number) for number in range(1, len(self.hosts))]
        dashboard = self.service.dashboard_url
        return all(joined) and len(nodes(dashboard)) >= len(self.hosts)

    def _joined(self, number: int) -> bool:
        """Whether a node has started; one that has ended is started again."""
        if not processes.is_alive(self.service.pids[f"node-{number}"]):
            self.start_node(number)
            return False
        return STARTED in self._log(number).read_bytes()[self._log_begins[number] :]

    def _log(self, number: int) -> Path:
        return self.state / f"ray-node-{number}.log"

    def deploy(
        self,
        config: Path,
        args: Mapping[str, Any],
        tell: Callable[[str], None] = lambda _: None,
        timeout_s: float = 600,
    ) -> Service:
        """Deploy a stage's config file and wait until it serves.

        Raises:
            RuntimeError: the deployment failed or took too long; the message is Serve's.
        """
        self.begin_to_deploy(config, args)
        wait_ready(self.service, tell, timeout_s)
        return self.service

    def begin_to_deploy(self, config: Path, args: Mapping[str, Any]) -> dict[str, Any]:
        """Deploy a stage's config file; returns it as it was deployed."""
        document = self._document = render(config, PORT, args)
        document["http_options"]["host"] = "0.0.0.0"
        self.service.model = document["applications"][0]["args"]["model"]["name"]
        (self.state / "serve.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
        deploy(self.service.dashboard_url, document)
        return document

    def empty(self) -> None:
        """Delete what is deployed, and start the nodes again that were killed."""
        dashboard = self.service.dashboard_url
        pids = [one["pid"] for one in replicas(dashboard) if one["pid"]]
        deploy(dashboard, {**self._document, "applications": []})
        kill_all(pids)
        for number, host in enumerate(self.hosts[1:], 1):
            if not any(processes.is_alive(pid) for pid in host.pids()):
                self.start_node(number)
        until("nothing is deployed", lambda: not application_status(dashboard), 240)
        self.wait_joined()

    def down(self) -> None:
        """Stop everything that was started, and nothing else."""
        ray_cluster.note_shared_memory(self.state)
        for host in self.hosts:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):  # it was not made
                host.kill()
        with contextlib.suppress(ProcessLookupError):
            self.service.down()
        self.network.down()

    def _place(self, number: int) -> Place:
        cpus, gpus = self._sizes[number]
        host = self.hosts[number]
        return Place(host.address, host.prefix, cpus, gpus)
