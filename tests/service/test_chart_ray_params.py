"""Ray accepts the chart's `rayStartParams`, as KubeRay passes them, and what they offer puts every
replica into its place.

`HERMES_TIMES=10` repeats it on ten clusters, because Serve chooses among nodes by chance.
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.cli import serve_api
from serve_app.cli.deploy_code import check_places
from serve_app.errors import SettingsError
from serve_app.local import ports, processes, ray_cluster, redis_server
from tests.chart.charts import Document, documents, merged, one, stage_values
from tests.service.machines import BIN
from tests.service.services import Services
from tests.waiting import until

# A release property.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
TRIES = 5
TIMES = int(os.environ.get("HERMES_TIMES", "1"))
AGENTS = ("dashboard-agent-listen", "dashboard-agent-grpc", "metrics-export", "runtime-env-agent")
TWO_AND_TWO: Document = {
    "settings": {"workers": {"replicas": 2}, "ingress": {"replicas": 2}},
    "ingressPods": {"replicas": 2},
    "auth": {"enabled": False},
}
"""The trial values with two pods of one CPU for two ingresses, and two such for two engines."""


@contextmanager
def started(state: Path, commands: list[list[str]], environment: dict[str, str]) -> Iterator[None]:
    """Run commands that start Ray nodes and return; stop the nodes afterwards."""
    folder = ray_cluster.short_folder(state)
    full = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "RAY_TMPDIR": str(folder),
        **environment,
    }
    try:
        # Where `ray start` gives up, Kubernetes starts the container again.
        for left in reversed(range(TRIES)):
            folder.mkdir(parents=True)
            told = start_all(commands, full)
            if not told:
                break
            told += raylets(folder)
            assert ray_cluster.GAVE_UP in told, told
            assert left, told
            ray_cluster.sweep(state)
        yield
    finally:
        ray_cluster.sweep(state)


def start_all(commands: list[list[str]], environment: dict[str, str]) -> str:
    """Run the commands, one after another: nodes of one folder would choose one socket. Returns
    what the first that failed said, and nothing if none did.
    """
    for words in commands:
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode:
            return done.stdout + done.stderr
    return ""


def raylets(folder: Path) -> str:
    """The ends of the raylets' logs."""
    logs = sorted((folder / "ray" / "session_latest" / "logs").glob("raylet*"))
    return "\n".join(f"{log.name}:\n{processes.tail(log)}" for log in logs)


def free_ports(dashboard: int, gcs: int) -> list[str]:
    """Options with free ports instead of Ray's fixed ones; of a repeated option, the last
    counts.
    """
    free = {name: ports.free_port() for name in ("ray-client-server", *AGENTS)}
    named = {
        **{f"{name}-port": port for name, port in free.items()},
        "dashboard-port": dashboard,
        "port": gcs,
    }
    return [f"--{name}={port}" for name, port in named.items()]


def nodes_of(cluster: Document, dashboard: int) -> list[list[str]]:
    """A command for each pod, the head's first. KubeRay writes each parameter as an option of
    `ray start` into a shell's command line.
    """

    def options(group: dict[str, Any]) -> str:
        return " ".join(f"--{name}={value}" for name, value in group["rayStartParams"].items())

    gcs = ports.free_port()
    ray = f"{BIN}/ray start --node-ip-address=127.0.0.1"
    fixed = " ".join(free_ports(dashboard, gcs))
    head = f"{ray} --head {options(cluster['headGroupSpec'])} {fixed} --dashboard-host=127.0.0.1"
    nodes = [
        f"{ray} --address=127.0.0.1:{gcs} {options(group)} "
        + " ".join(f"--{name}-port={ports.free_port()}" for name in AGENTS)
        for group in cluster["workerGroupSpecs"]
        for _ in range(group["replicas"])
    ]
    return [["bash", "-c", words] for words in (head, *nodes)]


def places(url: str) -> Counter[tuple[str, str]]:
    """How many running replicas of which deployment are on nodes that offer which resource."""
    offered = {
        node["node_id"]: next(
            (name for name in ("ingress", "engine") if name in node["resources_total"]), "neither"
        )
        for node in serve_api.nodes(url)
    }
    deployments = serve_api.application_status(url).get("deployments", {})
    return Counter(
        (name, offered[replica["node_id"]])
        for name, deployment in deployments.items()
        for replica in deployment["replicas"]
        if replica["state"] == "RUNNING"
    )


@pytest.mark.parametrize("time", range(TIMES))
def test_two_ingresses_and_two_engines_find_their_pods(
    services: Services, tmp_path: Path, time: int
) -> None:
    services.end()
    spec = one(documents(merged(stage_values("cpu"), TWO_AND_TWO)), "RayService")["spec"]
    config = yaml.safe_load(spec["serveConfigV2"])
    config["proxy_location"] = "Disabled"  # the nodes share this machine's port 8000
    args = config["applications"][0]["args"]
    args["engine"] = {"kind": "simulated"}
    dashboard = ports.free_port()
    url = f"http://127.0.0.1:{dashboard}"
    redis = redis_server.start(tmp_path / "redis")
    try:
        commands = nodes_of(spec["rayClusterConfig"], dashboard)
        with started(tmp_path / "state", commands, {"HERMES_REDIS_URL": redis.url()}):
            until("Ray knows every node", lambda: len(serve_api.nodes(url)) == 1 + 2 + 2)
            serve_api.deploy(url, config)
            wanted = {("Ingress", "ingress"): 2, ("Worker", "engine"): 2}
            until("two and two replicas are at their places", lambda: places(url) == wanted, 600)
            check_places("engine", url)
            with pytest.raises(SettingsError, match="no Ray node offers the resource 'elsewhere'"):
                check_places("elsewhere", url)
    finally:
        processes.end(redis.pid)
