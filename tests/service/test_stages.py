"""Every stage file deploys as it is, but for the engine, on GPUs that Ray is only told of; and serves.

Hosts are network namespaces; the engine is simulated, for there are no GPUs to compute on.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest
import yaml

from scripts.local import ray_cluster
from scripts.local.environment import ROOT
from scripts.local.nodes import Nodes
from scripts.local.service import application_status, deploy, render
from tests.service.services import Services
from tests.service.support import until

pytestmark = [pytest.mark.disturbs, pytest.mark.timeout(400)]
KEY = "hk-of-the-tests"
SIMULATED = {"engine": {"kind": "simulated", "args": {"tokens_per_s": 200}}}


@contextmanager
def nodes_of(
    folder: Path, sizes: list[tuple[int, int]], environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Nodes]:
    folder.mkdir(parents=True, exist_ok=True)
    keys = folder / "keys"
    keys.write_text(f"acme sha256:{hashlib.sha256(KEY.encode()).hexdigest()}\n")
    made = Nodes(folder, sizes, number=2)
    made.up({"HERMES_KEYS_FILE": str(keys), **environment})
    try:
        yield made
    finally:
        made.down()


@pytest.fixture(autouse=True)
def alone(services: Services) -> None:
    services.end()  # memory is for one service


def replicas(nodes: Nodes, deployment: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = application_status(nodes.service.dashboard_url)["deployments"][deployment]["replicas"]
    return found


def gpus_reserved(nodes: Nodes) -> list[float]:
    """By every actor that has any."""
    alive = "filter_keys=state&filter_predicates=%3D&filter_values=ALIVE"
    url = f"{nodes.service.dashboard_url}/api/v0/actors?detail=true&{alive}"
    with ray_cluster.ask(url, timeout_s=30) as answer:
        actors = json.load(answer)["data"]["result"]["result"]
    return [actor["required_resources"]["GPU"] for actor in actors if "GPU" in (actor["required_resources"] or {})]


def answers(url: str, model: str) -> bool:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 10}
    try:
        answer = httpx.post(
            f"{url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=10
        )
    except httpx.TransportError:
        return False
    return answer.status_code == 200 and len(answer.json()["choices"][0]["message"]["content"].split()) == 10


# File; CPUs and GPUs of the nodes, the head first; engines; GPUs of each; ingresses.
STAGES = {
    "single_gpu": ([(8, 1)], 1, 1, 2),
    "multi_gpu": ([(12, 4)], 2, 2, 2),
    "multi_node": ([(2, 0), (6, 4), (6, 4), (6, 4)], 2, 4, 3),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_deploys_and_serves(stage: str, tmp_path: Path) -> None:
    sizes, engines, gpus, ingresses = STAGES[stage]
    with nodes_of(tmp_path, sizes) as nodes:
        service = nodes.deploy(ROOT / "cluster" / f"{stage}.yaml", SIMULATED, timeout_s=150)
        assert len(replicas(nodes, "Worker")) == engines
        until("every GPU that is wanted is reserved", lambda: gpus_reserved(nodes) == [gpus] * engines)
        until("every ingress runs", lambda: len(replicas(nodes, "Ingress")) == ingresses)
        if stage == "multi_node":
            places = Counter(replica["node_ip"] for replica in replicas(nodes, "Ingress"))
            assert set(places.values()) == {1}, "each ingress on a node of its own"
            assert len({replica["node_ip"] for replica in replicas(nodes, "Worker")}) == engines
        for number in range(len(sizes)):
            until(f"node {number} answers", lambda n=number: answers(nodes.url(n), service.model))


def test_too_few_gpus_are_told_and_nothing_hangs(tmp_path: Path) -> None:
    with nodes_of(tmp_path, [(12, 1)]) as nodes:
        document = render(ROOT / "cluster" / "multi_gpu.yaml", 8000, SIMULATED)
        deploy(nodes.service.dashboard_url, document)

        def told() -> str:
            deployments = application_status(nodes.service.dashboard_url).get("deployments", {})
            return str(deployments.get("Worker", {}).get("message", ""))

        message = until("Serve says what it waits for", told)
        assert "GPU" in message
        assert yaml.safe_dump(document).count("tensor_parallel_size: 2") == 1
        url = f"http://{nodes.hosts[0].address}:8000"
        ready = until("the ingress says that there is no engine", lambda: problem(url))
        assert "engine" in ready


def problem(url: str) -> str:
    try:
        answer = httpx.get(f"{url}/readyz", timeout=5)
        return str(answer.json().get("problem") or "") if answer.status_code == 503 else ""
    except (httpx.TransportError, ValueError):
        return ""
