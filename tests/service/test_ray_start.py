"""How operators and the operator start Ray: `cluster/ray-start`, and the chart's `rayStartParams`, by Ray itself."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from scripts.local import processes, ray_cluster
from scripts.local.environment import ROOT
from tests.chart.charts import documents, one, stage_values
from tests.service.services import Services

BIN = ROOT / ".venv" / "bin"
pytestmark = pytest.mark.timeout(240)


@contextmanager
def started(state: Path, command: list[str], environment: dict[str, str], *more: list[str]) -> Iterator[list[int]]:
    """Run commands that start Ray nodes and return; the pids of what they leave behind, which is ended afterwards."""
    folder = ray_cluster.short_folder(state)
    folder.mkdir(parents=True)
    full = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "RAY_TMPDIR": str(folder), **environment}
    try:
        for words in (command, *more):
            done = subprocess.run(words, env=full, capture_output=True, text=True, timeout=100, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
        yield [pid for pid in processes.marked("RAY_TMPDIR", str(folder)) if processes.is_alive(pid)]
    finally:
        ray_cluster.sweep(state)


def ports(dashboard: int, gcs: int) -> list[str]:
    """Free ones in place of Ray's fixed ones: of an option that comes twice, the last counts."""
    free = {name: processes.free_port() for name in ("ray-client-server", "dashboard-agent-listen", "metrics-export")}
    named = {**{f"{name}-port": port for name, port in free.items()}, "dashboard-port": dashboard, "port": gcs}
    return [f"--{name}={port}" for name, port in named.items()]


def test_alone_means_that_nothing_of_ray_listens_but_on_the_loopback(services: Services, tmp_path: Path) -> None:
    services.end()
    dashboard, gcs = processes.free_port(), processes.free_port()
    script = str(ROOT / "cluster" / "ray-start")
    environment = {"HERMES_STATE": str(tmp_path / "haproxy")}
    head = [script, "alone", *ports(dashboard, gcs), "--num-cpus=1"]
    with started(tmp_path / "state", head, environment) as pids:
        assert ray_cluster.alive_nodes(f"http://127.0.0.1:{dashboard}") == 1
        open_to_all = {
            (psutil.Process(pid).name(), *listener.laddr)
            for pid in pids
            for listener in psutil.Process(pid).net_connections("tcp")
            if listener.status == psutil.CONN_LISTEN
            and listener.laddr.ip.removeprefix("::ffff:") not in ("127.0.0.1", "::1")
        }
    assert open_to_all == set()


def test_ray_takes_what_the_chart_tells_it(services: Services, tmp_path: Path) -> None:
    """As KubeRay does: each parameter becomes an option of `ray start`, in a shell's command line."""
    services.end()
    cluster = one(documents(stage_values("multi-node")), "RayService")["spec"]["rayClusterConfig"]

    def options(group: dict[str, Any]) -> str:
        return " ".join(f"--{name}={value}" for name, value in group["rayStartParams"].items())

    dashboard, gcs = processes.free_port(), processes.free_port()
    ray = f"{BIN}/ray start --node-ip-address=127.0.0.1"
    fixed = " ".join(ports(dashboard, gcs))
    head = f"{ray} --head {options(cluster['headGroupSpec'])} {fixed} --dashboard-host=127.0.0.1"
    nodes = [
        f"{ray} --address=127.0.0.1:{gcs} {options(group)} --dashboard-agent-listen-port={processes.free_port()}"
        f" --metrics-export-port={processes.free_port()}"
        for group in cluster["workerGroupSpecs"]
    ]
    commands = [["bash", "-c", words] for words in (head, *nodes)]
    with started(tmp_path / "state", commands[0], {}, *commands[1:]):
        found = ray_cluster.nodes(f"http://127.0.0.1:{dashboard}")
    assert len(found) == 1 + len(nodes)
    assert [node["resources_total"].get("ingress") for node in found if "ingress" in node["resources_total"]] == [1.0]
