"""How operators and the operator start Ray: `cluster/ray-start`, and the chart's `rayStartParams`, by Ray itself.

`ray-start` runs on hosts of their own (network namespaces), with Ray's fixed ports, as it would on machines.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from ray.serve.generated.serve_pb2 import ASGIRequest
from ray.serve.generated.serve_pb2_grpc import ASGIServiceStub

from scripts.local import processes, ray_cluster, redis_server
from scripts.local.environment import ROOT
from scripts.local.network import Host, Network
from scripts.local.service import render
from tests.chart.charts import documents, one, stage_values
from tests.service.services import Services
from tests.service.support import together, until

BIN = ROOT / ".venv" / "bin"
SCRIPT = str(ROOT / "cluster" / "ray-start")
KEY = "hk-of-the-tests"
AUTHORIZED = {"authorization": f"Bearer {KEY}"}
TOKEN = {"RAY_AUTH_MODE": "token"}
STRANGERS = {"none": {"RAY_AUTH_MODE": "disabled"}, "a wrong one": {**TOKEN, "RAY_AUTH_TOKEN": "f" * 64}}
pytestmark = pytest.mark.timeout(300)


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
        """A command in the operator's shell."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.home.mkdir(exist_ok=True)
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        full = {
            **own, "PATH": f"{BIN}:{own['PATH']}", "HOME": str(self.home), "RAY_TMPDIR": str(self.folder),
            "HERMES_STATE": str(self.folder), "RAY_prestart_worker_first_driver": "0", **self.exported, **more,
        }  # fmt: skip
        return subprocess.run(
            [*self.host.prefix, *words], env=full, capture_output=True, text=True, timeout=100, check=False
        )

    def ok(self, *words: str, **more: str) -> str:
        done = self.run(*words, **more)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def start(self, role: str, *options: str) -> str:
        """`cluster/ray-start`; the machine has no route by which Ray could find its address."""
        place = [] if role == "alone" else ["--node-ip-address", self.address]
        if role == "node":
            place += ["--temp-dir", str(self.folder / "ray")]  # else the head's, where machines share a disk
        return self.ok(SCRIPT, role, *options, *place, "--object-store-memory", str(128 * 1024 * 1024))

    @property
    def folder(self) -> Path:
        return ray_cluster.short_folder(self.home)

    def listening(self) -> set[tuple[str, str, int]]:
        """Process, address and port of everything that listens, but on the loopback."""
        lines = self.ok("ss", "--listening", "--tcp", "--numeric", "--processes", "--no-header").splitlines()
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
    """Machines on a network with a Redis that has the files that the project ships."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "keys").write_text(f"acme sha256:{hashlib.sha256(KEY.encode()).hexdigest()}\n")
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
        for host in network.hosts:  # the kernel may keep a namespace, and so this end of its wire, for minutes
            subprocess.run(["ip", "link", "del", host.wire], capture_output=True, check=False)


def deploy(head: Machine, changes: dict[str, Any]) -> None:
    """`cluster/practice.yaml` with a simulated engine, on every node's address."""
    args = {"engine": {"kind": "simulated", "args": {"tokens_per_s": 200}}, **changes}
    document = render(ROOT / "cluster" / "practice.yaml", 8000, args)
    document["proxy_location"], document["http_options"]["host"] = "EveryNode", "0.0.0.0"
    (head.home / "serve.yaml").write_text(yaml.safe_dump(document))
    head.ok("serve", "deploy", str(head.home / "serve.yaml"), **TOKEN)


def streams(address: str) -> bool:
    body = {
        "model": "hermes-tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 10, "stream": True,
    }  # fmt: skip
    url = f"http://{address}:8000/v1/chat/completions"
    try:
        return httpx.post(url, json=body, headers=AUTHORIZED, timeout=10).text.endswith("data: [DONE]\n\n")
    except httpx.TransportError:
        return False


def running(head: Machine) -> bool:
    told = head.run("serve", "status", **TOKEN)
    applications = (yaml.safe_load(told.stdout) or {}).get("applications", {}) if told.returncode == 0 else {}
    return bool(applications.get("hermes", {}).get("status") == "RUNNING")


def unpickles(address: str, port: int, witness: Path, token: str) -> bool:
    """Whether a replica's port for other replicas executes what a stranger sends it."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (witness,)

    with grpc.insecure_channel(f"{address}:{port}") as channel, contextlib.suppress(grpc.RpcError):
        ASGIServiceStub(channel).HandleRequest(
            ASGIRequest(pickled_request_metadata=pickle.dumps(Bomb())),
            metadata=[("authorization", f"Bearer {token}")] if token else [], timeout=10,
        )  # fmt: skip
    done = witness.exists()
    witness.unlink(missing_ok=True)
    return done


def of_replicas(machine: Machine) -> list[int]:
    return [port for name, address, port in machine.listening() if name.startswith("ray::ServeRepl") and address == "*"]


# -- one machine ---------------------------------------------------------------------------------------------


def test_alone_leaves_nothing_open_but_what_serve_itself_opens(services: Services, tmp_path: Path) -> None:
    services.end()
    with hosts(tmp_path / "machines", 1) as (machine,):
        machine.start("alone", "--num-cpus", "4", "--resources", '{"ingress": 1}')
        assert machine.listening() == set()
        deploy(machine, {"workers": {"replicas": 1}, "ingress": {"replicas": 1}})
        until("it serves", lambda: streams(machine.address))
        internal = of_replicas(machine)
        opened = {port for _, _, port in machine.listening()} - set(internal)
        # The service, and behind it Serve's fallback and the ingress itself: they want an API key. HAProxy's own pages.
        assert opened == {8000, 8500, 30000}
        token = (machine.home / ".ray" / "auth_token").read_text()
        obeying = [port for port in internal if unpickles(machine.address, port, tmp_path / "witness", token)]
        assert len(obeying) >= 2, "replicas listen for one another, so the token is needed"
        for port in internal:
            for wrong in ("", "f" * 64):
                assert not unpickles(machine.address, port, tmp_path / "witness", wrong)


# -- several -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(services: Services, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Machine]]:
    """A head and a node, started as docs/stages.md says, that serve."""
    services.end()
    with hosts(tmp_path_factory.mktemp("machines"), 2) as (head, node):
        told = head.start("head", "--num-cpus", "0", "--resources", '{"ingress": 1}')
        token = head.home / ".ray" / "auth_token"
        assert f"Ray's token is new and lies in {token}" in told
        assert token.stat().st_mode & 0o077 == 0
        refused = node.run(SCRIPT, "node", f"{head.address}:6379")
        assert refused.returncode == 2
        assert refused.stderr.startswith("cluster/ray-start node: no token")
        assert refused.stderr.count("\n") == 1
        shutil.copytree(token.parent, node.home / ".ray")
        node.start("node", f"{head.address}:6379", "--num-cpus", "2")
        deploy(head, {})
        until("Serve has what it wants", lambda: running(head), 120)
        for machine in (head, node):
            until("it serves", lambda machine=machine: streams(machine.address))
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


@pytest.mark.parametrize("stranger", STRANGERS)
def test_whoever_has_not_the_token_is_refused_at_every_door_of_ray(cluster: list[Machine], stranger: str) -> None:
    head, node = cluster
    job = "from ray.job_submission import JobSubmissionClient as C; C('http://127.0.0.1:8265')"
    doors = {
        "a job": f"{job}.submit_job(entrypoint='true')",
        "a driver": f"import ray; ray.init('{head.address}:6379')",
        "Ray client": f"import ray; ray.init('ray://{head.address}:10001')",
    }

    def opens(code: str, credentials: dict[str, str]) -> bool:
        return head.run(str(BIN / "python"), "-c", code, **credentials).returncode == 0

    credentials = STRANGERS[stranger]
    let_in = together([lambda code=code: opens(code, credentials) for code in doors.values()])
    assert let_in == [False] * len(doors), dict(zip(doors, let_in, strict=True))
    for door, code in doors.items():
        until(f"{door} is let in with the token", lambda code=code: opens(code, TOKEN), 120)
    agent = f"http://{node.address}:52365/api/job_agent/jobs/"
    wrong = credentials.get("RAY_AUTH_TOKEN", "")
    headers = {"authorization": f"Bearer {wrong}"} if wrong else {}
    assert httpx.post(agent, json={"entrypoint": "true"}, headers=headers).status_code == (403 if wrong else 401)
    witness = head.home / "witness"
    ports = [(machine.address, port) for machine in cluster for port in of_replicas(machine)]
    assert not [place for place in ports if unpickles(*place, witness, wrong)]
    token = (head.home / ".ray" / "auth_token").read_text()
    assert sum(unpickles(*place, witness, token) for place in ports) == 4, "each replica has one such port"


def test_the_token_fills_no_log(cluster: list[Machine]) -> None:
    """Each refusal is a line; what has the token is not mentioned again and again."""
    token = (cluster[0].home / ".ray" / "auth_token").read_text()
    said = 0
    for machine in cluster:
        for log in (machine.folder / "ray").rglob("logs/**/*"):
            if log.is_file():
                text = log.read_text(errors="replace")
                assert token not in text, log
                said += sum("token auth" in line.lower() or "InvalidAuthToken" in line for line in text.splitlines())
    assert said < 30


def test_a_head_that_dies_finds_in_redis_what_it_knew(cluster: list[Machine]) -> None:
    head, node = cluster
    head.host.kill()
    (head.folder / "ray" / "ray_current_cluster").unlink(missing_ok=True)
    head.start("head", "--num-cpus", "0", "--resources", '{"ingress": 1}')
    until("Serve is as it was", lambda: running(head), 120)
    for machine in (head, node):
        until("it serves", lambda machine=machine: streams(machine.address))


# -- AWS -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["", "keys", "ray-token", "redis-url", "gcs-redis-password"])
def test_a_machine_on_aws_does_not_start_without_what_it_must_know(tmp_path: Path, missing: str) -> None:
    store = tmp_path / "aws"
    store.write_text(f'#!/bin/sh\ntest "$6" != "/hermes/{missing}" && echo "a value of $6\'s"\n')
    store.chmod(0o755)
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    script = ROOT / "cluster" / "launch" / "aws-secrets"
    done = subprocess.run([script, "eu-central-1"], env=own, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (not missing), done.stderr
    environment = tmp_path / ".hermes" / "environment"
    assert environment.exists() == (not missing)
    if not missing:
        read = f". {environment} && echo $HERMES_GCS_REDIS_PASSWORD, $RAY_AUTH_MODE"
        assert (
            subprocess.check_output(["bash", "-c", read], text=True)
            == "a value of /hermes/gcs-redis-password's, token\n"
        )
        files = [environment, tmp_path / ".ray" / "auth_token", tmp_path / ".hermes" / "keys"]
        assert [file.stat().st_mode & 0o077 for file in files] == [0, 0, 0]


def test_what_must_be_filled_in_for_aws_is_said_for_every_machine() -> None:
    """Ray's own check of the file (tests/unit/test_documents.py) does not miss these."""
    types = yaml.safe_load((ROOT / "cluster" / "launch" / "aws.yaml").read_text())["available_node_types"]
    for node in types.values():
        assert node["node_config"]["ImageId"] == "ami-REPLACE"
        assert node["node_config"]["IamInstanceProfile"]["Name"].startswith("hermes-")


# -- the chart -----------------------------------------------------------------------------------------------


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
