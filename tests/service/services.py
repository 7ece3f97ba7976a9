"""The services that the tests use, and how they are started, one at a time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from serve_app.local import ports, processes, ray_cluster
from serve_app.local import service as local
from serve_app.local.environment import ROOT
from tests import bpe_model
from tests.service.collector import Collector
from tests.service.nodes import Nodes
from tests.service.support import Running

CONFIG = ROOT / "cluster" / "local_cpu.yaml"
PATIENT = Path(__file__).parent / "patient"
MAX_RUNNING = 12
WORKERS, PLACES = 3, 16
"""Of the simulated service: its workers, and how many requests each runs at once."""
MAX_WAITING_BATCH = 2
HELD = "HELD"
"""A simulated engine gives a request with this word some tokens and then no more: it keeps its
place until it is cancelled.
"""
KEYS = {
    tenant: f"hk-{hashlib.sha256(f'key of {tenant}'.encode()).hexdigest()}"
    for tenant in ("acme", "zeta", "late", "@metrics")
}
"""The API key of each tenant of the simulated service."""

KINDS: dict[str, dict[str, Any]] = {
    "shared": {
        "args": {
            "model": {"aliases": ["gpt-5*"]},
            "workers": {"max_running_requests": MAX_RUNNING},
            "ingress": {"heartbeat_s": 1.0, "disconnect_grace_s": 5.0},
            "telemetry": {
                "snapshot_period_s": 0.5,
                "page_period_s": 0,
            },  # two looks in a row see what came between
        },
        "haproxy": True,
    },
    "simulated": {
        "args": {
            "engine": {
                "kind": "simulated",
                "args": {
                    "tokens_per_s": 40,
                    "faults": {"POISON": "exit", "STANDSTILL": "hang", HELD: "stay"},
                },
            },
            "workers": {
                "replicas": WORKERS,
                "max_running_requests": PLACES,
                "health_check_period_s": 1.0,
                "health_check_timeout_s": 60.0,
                "graceful_shutdown_timeout_s": 10.0,
            },
            "auth": {"required": True},
            "queue": {"max_waiting_batch": MAX_WAITING_BATCH},
            "ingress": {"heartbeat_s": 1.0, "disconnect_grace_s": 15.0},
            "telemetry": {
                "log_format": "json",
                "snapshot_period_s": 0.5,
                "page_period_s": 0,
            },  # two looks in a row see what came between
        },
        "haproxy": True,
        "keys": True,
    },
    "flooded": {
        "args": {"workers": {"max_running_requests": MAX_RUNNING}, "auth": {"required": True}},
        "haproxy": True,
        "keys": True,
    },
    "embedding": {
        "args": {
            "engine": {"args": {"runner": "pooling", "convert": "embed"}},
            "workers": {"max_running_requests": MAX_RUNNING},
            "auth": {"required": True},
        },
        "haproxy": True,
        "keys": True,
    },
    "agents": {
        "args": {
            "model": {"name": "bpe", "source": str(bpe_model.FOLDER)},
            "engine": {
                "args": {
                    "max_model_len": bpe_model.POSITIONS,
                    "logits_processors": ["tests.scripted_model:Scripted"],
                }
            },
        },
        "haproxy": True,
    },
    "tensor-parallel": {
        "args": {
            "workers": {"replicas": 1, "tensor_parallel_size": 4, "max_running_requests": 8},
            "ingress": {"heartbeat_s": 1.0},
        },
        "haproxy": False,
        "traced": True,
    },
}

LIMITS: dict[bool, dict[str, Any]] = {
    False: {
        "redis": {"connect_timeout_s": 60, "response_timeout_s": 60, "admission_timeout_s": 60},
        "workers": {"engine_stall_timeout_s": 60.0},
    },
    True: {"workers": {"engine_stall_timeout_s": 5.0}},
}
"""How long a service waits before it takes something for dead. A test of an outage or a hang (True)
has production's limits and an early stall; all others have time.
"""

NODES: dict[str, list[tuple[int, int]]] = {
    "gpu-machine": [(12, 4)],
    "gpu-nodes": [(2, 0), (6, 4), (6, 4), (6, 4)],
}
"""CPUs and GPUs that Ray is told its nodes have, the head first."""
ENGINES_ON_CPUS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


def let_in(folder: Path, *tenants: str) -> Path:
    """Write the file of API keys of the service in `folder`, which lets in these tenants."""
    lines = [
        f"{tenant} sha256:{hashlib.sha256(KEYS[tenant].encode()).hexdigest()}\n"
        for tenant in tenants
    ]
    file = folder / "keys"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(lines))
    return file


def limited(kind: str, outage: bool) -> dict[str, Any]:
    """The settings of a kind, with the limits that its tests need."""
    return local.merged(KINDS[kind]["args"], LIMITS[outage])


def environment(outage: bool) -> dict[str, str]:
    """The environment of a service under test: this checkout's code, whatever the environment of
    Python has installed, and patient/sitecustomize.py.
    """
    return {
        "PYTHONPATH": os.pathsep.join((str(PATIENT), str(ROOT))),
        "PATIENCE": "1" if outage else "10",
        "RAY_worker_niceness": "0",
        "TORCHINDUCTOR_CACHE_DIR": os.environ["TORCHINDUCTOR_CACHE_DIR"],
    }


def kill(service: local.Service) -> None:
    """Kill everything in a service's Ray, at once."""
    state = Path(service.state_dir)
    ray_cluster.note_shared_memory(state)
    mark = str(ray_cluster.short_folder(state))
    while alive := [pid for pid in processes.marked("RAY_TMPDIR", mark) if processes.is_alive(pid)]:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def end(service: local.Service) -> None:
    """Stop a service and remove its files. An orderly shutdown would take Ray 15 s."""
    kill(service)
    service.down()


class Services:
    """Starts the service that a test needs, and stops the previous one, because there is memory for
    only one.
    """

    def __init__(self, folder: Path, keep: bool) -> None:
        self._folder = folder
        self._keep = keep
        self.kind = ""
        self.broken = False
        """A test that disturbs the service has failed: nobody knows what it has left."""
        self.collector: Collector | None = None
        self.current: Running | None = None
        self._nodes: Nodes | None = None

    def get(self, kind: str, outage: bool = False) -> Running:
        """The service of a kind, running; `outage`: with the limits for a test of one."""
        name = f"{kind}-outage" if outage else kind
        if self.current is None or self.kind != name or self.broken:
            self.end()
            if KINDS[kind].get("traced"):
                self.collector = Collector(self._port_of_traces(name))
            kept = local.Service.load(self._folder / name)
            keys = KEYS if KINDS[kind].get("keys") else {}
            self.kind, self.current = name, Running(kept or self._start(kind, outage, name), keys)
        assert self.current is not None
        return self.current

    def _start(self, kind: str, outage: bool, name: str) -> local.Service:
        storage = {"files": {"storage": str(self._folder / name / "files")}}
        args = local.merged(storage, limited(kind, outage))
        if self.collector is not None:
            args = local.merged(args, {"telemetry": {"traces_endpoint": self.collector.endpoint}})
        variables = environment(outage)
        if KINDS[kind].get("keys"):
            keys = let_in(self._folder / name, "acme", "zeta", "@metrics")
            variables["HERMES_KEYS_FILE"] = str(keys)
        return local.start(
            self._folder / name,
            CONFIG,
            ports.free_port(),
            args,
            haproxy=KINDS[kind]["haproxy"],
            environment=variables,
            timeout_s=900,
        )

    def nodes(self, kind: str) -> Nodes:
        """Nodes of a kind, all of them alive and nothing deployed; `acme` is let in there."""
        if self._nodes is not None and self.kind == kind and not self.broken:
            self._nodes.empty()
            return self._nodes
        self.end()
        # A folder of its own: Ray's head would find in Redis what an earlier one knew.
        folder = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=self._folder))
        keys = let_in(folder, "acme")
        made = Nodes(folder, NODES[kind], number=2)
        made.up({"HERMES_KEYS_FILE": str(keys), **ENGINES_ON_CPUS})
        self.kind, self._nodes = kind, made
        return made

    def _port_of_traces(self, name: str) -> int:
        """The port to which a kept service sends its traces; 0 if it sends none."""
        config = self._folder / name / "serve.yaml"
        if not config.exists():
            return 0
        args = yaml.safe_load(config.read_text())["applications"][0]["args"]
        return urlsplit(args["telemetry"]["traces_endpoint"]).port or 0

    def end(self) -> None:
        """Stop the running service, or the nodes."""
        self.broken = False
        if self._nodes is not None:
            self._nodes.down()
            self._nodes = None
        if self.collector is not None:
            self.collector.close()
            self.collector = None
        if self.current is not None:
            self.current.close()
            if not self._keep:
                end(self.current.service)
            self.current = None

    def logs(self) -> str:
        """The last lines of the service's own loggers, and tracebacks."""
        if self.current is None:
            return ""
        folder = (
            ray_cluster.short_folder(Path(self.current.service.state_dir))
            / "ray"
            / "session_latest"
            / "logs"
        )
        parts = []
        for path in sorted(folder.glob("worker-*.err")):
            lines = path.read_text(errors="replace").splitlines()
            told = [
                line
                for line in lines
                if " hermes." in line or "Error" in line or line.startswith("  File")
            ]
            if told:
                parts.append("\n".join([f"--- {path.name}", *told[-15:]]))
        return "\n".join(parts)
