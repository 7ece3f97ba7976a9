"""`cluster/ray-start` starts Ray with a token, and Ray rejects anyone without it.

It runs on separate hosts (network namespaces) with Ray's fixed ports, as on real machines.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from ray.serve.generated.serve_pb2 import ASGIRequest
from ray.serve.generated.serve_pb2_grpc import ASGIServiceStub

from serve_app.local.environment import ROOT
from serve_app.local.service import render
from tests.service.machines import BIN, Machine, hosts
from tests.service.services import KEYS, Services
from tests.service.support import answers, of_tenant, together
from tests.waiting import until

TOKEN = {"RAY_AUTH_MODE": "token"}
WRONG_TOKEN = "f" * 64
STRANGERS = {
    "without a token": {"RAY_AUTH_MODE": "disabled"},
    "with a wrong token": {**TOKEN, "RAY_AUTH_TOKEN": WRONG_TOKEN},
}
# A release property.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]


def deploy(head: Machine, changes: dict[str, Any]) -> None:
    """`cluster/practice.yaml` with a simulated engine, on every node's address."""
    args = {"engine": {"kind": "simulated", "args": {"tokens_per_s": 200}}, **changes}
    document = render(ROOT / "cluster" / "practice.yaml", 8000, args)
    document["proxy_location"], document["http_options"]["host"] = "EveryNode", "0.0.0.0"
    (head.home / "serve.yaml").write_text(yaml.safe_dump(document))
    head.ok("serve", "deploy", str(head.home / "serve.yaml"), **TOKEN)


def serves(machine: Machine) -> bool:
    return answers(f"http://{machine.address}:8000", KEYS["acme"])


def running(head: Machine) -> bool:
    told = head.run("serve", "status", **TOKEN)
    found = yaml.safe_load(told.stdout) if told.returncode == 0 else None
    applications = (found or {}).get("applications", {})
    return bool(applications.get("hermes", {}).get("status") == "RUNNING")


def unpickles(address: str, port: int, witness: Path, token: str) -> bool:
    """Whether a replica's port for other replicas executes what a stranger sends."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (witness,)

    with grpc.insecure_channel(f"{address}:{port}") as channel, contextlib.suppress(grpc.RpcError):
        ASGIServiceStub(channel).HandleRequest(
            ASGIRequest(pickled_request_metadata=pickle.dumps(Bomb())),
            metadata=[("authorization", f"Bearer {token}")] if token else [],
            timeout=60,
        )
    done = witness.exists()
    witness.unlink(missing_ok=True)
    return done


def of_replicas(machine: Machine) -> list[int]:
    return [
        port
        for name, address, port in machine.listening()
        if name.startswith("ray::ServeRepl") and address == "*"
    ]


# -- one machine ---------------------------------------------------------------------------------


def test_alone_leaves_nothing_open_but_what_serve_itself_opens(
    services: Services, tmp_path: Path
) -> None:
    services.end()
    with hosts(tmp_path / "machines", 1) as (machine,):
        machine.start("alone", "--num-cpus", "4", "--resources", '{"ingress": 1, "engine": 1}')
        assert machine.listening() == set()
        deploy(machine, {"workers": {"replicas": 1}, "ingress": {"replicas": 1}})
        until("it serves", lambda: serves(machine))
        opened = {port for _, _, port in machine.listening()}
        # The service, and behind it Serve's fallback and the ingress itself: they want an API key.
        # HAProxy's own pages.
        assert opened == {8000, 8500, 30000}


# -- several -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(
    services: Services, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Machine]]:
    """A head and a node that serve, started as docs/install.md describes."""
    services.end()
    with hosts(tmp_path_factory.mktemp("machines"), 2) as (head, node):
        told = head.start("head", "--num-cpus", "0", "--resources", '{"ingress": 1}')
        token = head.home / ".ray" / "auth_token"
        assert f"created Ray's token in {token}" in told
        assert token.stat().st_mode & 0o077 == 0
        shutil.copytree(token.parent, node.home / ".ray")
        node.start("node", f"{head.address}:6379", "--num-cpus", "2")
        deploy(head, {})
        until("Serve has what it wants", lambda: running(head), 300)
        for machine in (head, node):
            until("it serves", partial(serves, machine))
        yield [head, node]


def test_operators_commands_work_with_the_token_and_say_so_without(cluster: list[Machine]) -> None:
    head, _ = cluster
    assert running(head)
    nodes = json.loads(head.run("ray", "list", "nodes", "--format", "json", **TOKEN).stdout)
    assert [node["state"] for node in nodes] == ["ALIVE"] * 2
    for words in (("serve", "status"), ("ray", "list", "nodes")):
        without = head.run(*words)
        assert without.returncode != 0
        assert "AuthenticationError" in without.stderr


def test_every_port_of_ray_rejects_callers_without_the_token(cluster: list[Machine]) -> None:
    head, node = cluster
    job = "from ray.job_submission import JobSubmissionClient as C; C('http://127.0.0.1:8265')"
    doors = {
        "a job": f"{job}.submit_job(entrypoint='true')",
        "a driver": f"import ray; ray.init('{head.address}:6379')",
        "Ray client": f"import ray; ray.init('ray://{head.address}:10001')",
    }

    def opens(code: str, credentials: dict[str, str]) -> bool:
        return head.run(str(BIN / "python"), "-c", code, **credentials).returncode == 0

    tried = [(stranger, door) for stranger in STRANGERS for door in doors]
    let_in = together([partial(opens, doors[door], STRANGERS[name]) for name, door in tried])
    assert not any(let_in), dict(zip(tried, let_in, strict=True))
    for door, code in doors.items():
        until(f"{door} is let in with the token", partial(opens, code, TOKEN), 300)
    witness = head.home / "witness"
    ports = [(machine.address, port) for machine in cluster for port in of_replicas(machine)]
    agent = f"http://{node.address}:52365/api/job_agent/jobs/"
    for wrong, status in (("", 401), (WRONG_TOKEN, 403)):
        headers = of_tenant(wrong) if wrong else {}
        asked = httpx.post(agent, json={"entrypoint": "true"}, headers=headers, timeout=60)
        assert asked.status_code == status
        assert not [place for place in ports if unpickles(*place, witness, wrong)]
    token = (head.home / ".ray" / "auth_token").read_text()
    obey = sum(unpickles(*place, witness, token) for place in ports)
    assert obey == 4, "each replica has one such port"


def test_the_token_fills_no_log(cluster: list[Machine]) -> None:
    """Each rejected connection logs one line; connections with the token log nothing."""
    token = (cluster[0].home / ".ray" / "auth_token").read_text()
    said = 0
    for machine in cluster:
        for log in (machine.folder / "ray").rglob("logs/**/*"):
            if log.is_file():
                text = log.read_text(errors="replace")
                assert token not in text, log
                said += len(re.findall("(?im)^.*(token auth|InvalidAuthToken).*$", text))
    assert said < 30


def test_a_head_that_dies_finds_in_redis_what_it_knew(cluster: list[Machine]) -> None:
    head, node = cluster
    head.host.kill()
    (head.folder / "ray" / "ray_current_cluster").unlink(missing_ok=True)
    head.start("head", "--num-cpus", "0", "--resources", '{"ingress": 1}')
    until("Serve is as it was", lambda: running(head), 300)
    for machine in (head, node):
        until("it serves", partial(serves, machine))
