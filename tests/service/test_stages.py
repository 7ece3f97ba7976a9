"""Every stage file deploys unchanged except for the engine, and serves, on GPUs that Ray is only
told of.

Hosts are network namespaces; the engine is simulated, because there are no GPUs.
"""

from __future__ import annotations

from functools import partial

import httpx
import pytest

from serve_app.cli import serve_api
from serve_app.cli.serve_api import application_status
from serve_app.local.environment import ROOT
from tests.service.nodes import Nodes
from tests.service.services import KEYS
from tests.service.support import answers, replicas
from tests.waiting import until

# A release property.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]
SIMULATED = {"engine": {"kind": "simulated", "args": {"tokens_per_s": 200}}}


def reserved(nodes: Nodes, resource: str) -> list[float]:
    """How much of a resource each actor has reserved that has any."""
    alive = "filter_keys=state&filter_predicates=%3D&filter_values=ALIVE"
    url = f"{nodes.service.dashboard_url}/api/v0/actors?detail=true&{alive}"
    actors = serve_api.ask(url, timeout_s=120).json()["data"]["result"]["result"]
    required = [actor["required_resources"] or {} for actor in actors]
    return [one[resource] for one in required if resource in one]


def check_deployment(nodes: Nodes, stage: str, engines: int, gpus: int, ingresses: int) -> None:
    """The stage has what its file says, and every node answers."""
    service = nodes.deploy(ROOT / "cluster" / f"{stage}.yaml", SIMULATED, timeout_s=600)
    dashboard = service.dashboard_url
    until("every engine runs", lambda: len(replicas(dashboard, "Worker")) == engines)
    wanted = [gpus] * engines
    until("every GPU that is wanted is reserved", lambda: reserved(nodes, "GPU") == wanted)
    until("every ingress runs", lambda: len(replicas(dashboard, "Ingress")) == ingresses)
    for number in range(len(nodes.hosts)):
        there = partial(answers, nodes.url(number), KEYS["acme"], service.model)
        until(f"node {number} answers", there)


# File; CPUs that suffice; engines; GPUs of each.
@pytest.mark.parametrize(
    ("stage", "cpus", "engines", "gpus"), [("single_gpu", 8, 1, 1), ("multi_gpu", 12, 2, 2)]
)
def test_a_stage_deploys_and_serves_on_one_machine(
    gpu_machine: Nodes, stage: str, cpus: int, engines: int, gpus: int
) -> None:
    check_deployment(gpu_machine, stage, engines, gpus, ingresses=2)
    assert sum(reserved(gpu_machine, "CPU")) <= cpus


def test_a_stage_deploys_and_serves_on_many_nodes(gpu_nodes: Nodes) -> None:
    check_deployment(gpu_nodes, "multi_node", engines=2, gpus=4, ingresses=3)
    places = {
        name: [one["node_ip"] for one in replicas(gpu_nodes.service.dashboard_url, name)]
        for name in ("Ingress", "Worker")
    }
    assert [len(set(of_name)) for of_name in places.values()] == [3, 2], "each on a node of its own"


def test_too_few_gpus_are_told_and_nothing_hangs(gpu_machine: Nodes) -> None:
    eight_each = {**SIMULATED, "workers": {"tensor_parallel_size": 8}}
    gpu_machine.begin_to_deploy(ROOT / "cluster" / "multi_gpu.yaml", eight_each)

    def told() -> str:
        deployments = application_status(gpu_machine.service.dashboard_url).get("deployments", {})
        return str(deployments.get("Worker", {}).get("message", ""))

    message = until("Serve says what it waits for", told)
    assert "GPU" in message
    ready = until("the ingress says that there is no engine", lambda: problem(gpu_machine.url(0)))
    assert "engine" in ready


def problem(url: str) -> str:
    try:
        answer = httpx.get(f"{url}/readyz", timeout=30)
        return str(answer.json().get("problem") or "") if answer.status_code == 503 else ""
    except (httpx.TransportError, ValueError):
        return ""
