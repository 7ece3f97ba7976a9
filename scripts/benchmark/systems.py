"""Who is measured: the service itself, and the peers it is measured against. What is started here
is always ended, by the stack it is given to: exactly that and what descends from it, by pid, never
by name.
"""

import hashlib
import json
import os
import secrets
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from serve_app.demo import peer as bare_vllm
from serve_app.local import __main__ as quickstart
from serve_app.local import processes, ray_cluster, service, surroundings
from serve_app.local.environment import ROOT
from serve_app.local.ports import free_port, is_taken

from . import ray_direct
from .run import SystemFailed, fetch

_HERE, _PEERS = Path(__file__).parent, ROOT / ".hermes" / "peers"
_MODEL = str(ROOT / "workers" / "tiny_model")
_TORCH = "torch==2.13.0"
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_NAME = "bench-model"
_FOLDER = "HERMES_BENCH_FOLDER"
# Ray counts logical CPUs and would wait for ever for more than the machine has.
_RAY_CPUS = 16
_READY_WITHIN_S = 300.0
_INSTALL_TIMEOUT_S = 1800


@dataclass
class System:
    """An endpoint, and what its processes have in their arguments or environment."""

    name: str
    url: str
    model: str
    marks: tuple[str, ...]
    redis_url: str = ""
    behind: tuple[str, ...] = ()
    """The endpoints that a gateway sends to."""

    @property
    def page(self) -> str:
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}/metrics"


def existing(options: Namespace, _: Path, __: ExitStack) -> System:
    """The service that runs already under ``--url``."""
    model = options.model or _served_model(options.url, options.api_key)
    return System("hermes-serve", options.url, model, tuple(options.match))


def start_own(options: Namespace, folder: Path, stack: ExitStack) -> System:
    """This repository's service, as `scripts/quickstart` starts it; beside ray-direct with the
    simulated engine, whose tokens that peer has, too.
    """
    settings, state = list(options.settings), folder / "state"
    if options.batching or options.beside_batch:  # their tables have metrics
        settings += ["telemetry.snapshot_period_s=0.2", "telemetry.page_period_s=0"]
    if "ray-direct" in options.against:
        rate = f"engine.args.tokens_per_s={ray_direct.TOKENS_PER_S}"
        settings = ["engine.kind=simulated", rate, *settings]
    words = [f"--replicas={options.replicas}", f"--ingress-replicas={options.replicas}"]
    words += [f"--set={setting}" for setting in settings]
    changes = quickstart.changes(quickstart.arguments(words), "cpu")
    config, kept_logs = ROOT / "cluster" / "local_cpu.yaml", ROOT / ".hermes" / "bench-logs"
    try:
        # The state folder does not stay.
        running = service.start(
            state,
            config,
            free_port(),
            changes,
            environment={"PYTHONPATH": str(ROOT)},  # this checkout, whatever is installed
            kept_logs=kept_logs,
        )
    except RuntimeError as failed:
        raise SystemFailed(f"hermes-serve: {failed}") from None
    stack.callback(running.down)
    marks = (str(state), str(ray_cluster.short_folder(state)))
    return System("hermes-serve", f"{running.url}/v1", running.model, marks, running.redis_url)


class Peer:
    """The processes of one peer. An environment variable that they inherit finds those that
    daemonised.
    """

    def __init__(self, name: str, folder: Path, stack: ExitStack) -> None:
        self.name = name
        self.folder = folder / name
        self.folder.mkdir()
        self._log = self.folder / "log"
        # vLLM's sockets go with the folder, and do not stay in the machine's temporary one.
        own = {_FOLDER: str(self.folder), "VLLM_RPC_BASE_PATH": str(folder)}
        self._environment = surroundings.kept(os.environ) | bare_vllm.CPU_ENGINE | own
        self._started: list[int] = []
        stack.callback(self._end)

    def start(self, command: Sequence[str], **more: str) -> None:
        """Start ``command`` with ``more`` in its environment."""
        environment = self._environment | more
        self._started.append(processes.start(command, self._log, environment, ROOT))

    def wait(self, what: str, is_ready: Callable[[], bool]) -> None:
        """Return when ``is_ready``; fail when the newest process ends or the time is over."""
        _wait(f"{self.name}: {what}", is_ready, self._started[-1], self._log)

    def serving(self, port: int, model: str) -> System:
        """The peer, once it lists its models."""
        url = f"http://127.0.0.1:{port}/v1"
        self.wait(url, lambda: bool(fetch(f"{url}/models")))
        return System(self.name, url, model, (str(self.folder),))

    def _end(self) -> None:
        for pid in (*reversed(self._started), *processes.marked(_FOLDER, str(self.folder))):
            processes.end(pid)


def start_bare_vllm(options: Namespace, folder: Path, stack: ExitStack) -> System:
    """vLLM's own server, alone."""
    return _start_vllm(options, Peer("bare-vllm", folder, stack))


def _start_vllm(options: Namespace, peer: Peer) -> System:
    port, model = free_port(), options.model or _NAME
    command = [*bare_vllm.server(_MODEL, model, port, 4096), *bare_vllm.CPU_ARGUMENTS]
    if options.kill:  # its server ends with its engine core; systemd or Kubernetes starts it again
        command = ["sh", "-c", 'while :; do "$@"; sleep 0.2; done', "sh", *command]
    peer.start(command)
    return peer.serving(port, model)


def start_vllm_router(options: Namespace, folder: Path, stack: ExitStack) -> System:
    """What PyPI has as `vllm-router` in front of vLLMs, with its defaults but for the policy: every
    vLLM has its part of the streams.
    """
    python = _installed("gateways")
    peer, port = Peer("vllm-router", folder, stack), free_port()
    vllms = [_start_vllm(options, peer) for _ in range(options.replicas)]
    command = [str(python.parent / "vllm-router"), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port()), "--policy", "round_robin", "--worker-urls"]
    peer.start(command + [one.url.removesuffix("/v1") for one in vllms])
    return replace(peer.serving(port, vllms[0].model), behind=tuple(one.url for one in vllms))


def start_litellm(options: Namespace, folder: Path, stack: ExitStack) -> System:
    """LiteLLM's proxy in front of vLLMs, with its defaults."""
    python = _installed("gateways")
    peer, port = Peer("litellm", folder, stack), free_port()
    vllms = [_start_vllm(options, peer) for _ in range(options.replicas)]
    models = [
        {
            "model_name": one.model,
            "litellm_params": {
                "model": f"hosted_vllm/{one.model}",
                "api_base": one.url,
                "api_key": "none",
            },
        }
        for one in vllms
    ]
    config = peer.folder / "config.yaml"
    config.write_text(json.dumps({"model_list": models}))
    alone = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would fetch a list at its start
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    }
    command = [str(python.parent / "litellm"), "--config", str(config), "--host", "127.0.0.1"]
    peer.start([*command, "--port", str(port)], **alone)
    return replace(peer.serving(port, vllms[0].model), behind=tuple(one.url for one in vllms))


def start_ray_serve_llm(options: Namespace, folder: Path, stack: ExitStack) -> System:
    """Ray Serve LLM with its defaults, on a Ray head of its own."""
    # It is pinned to another vLLM than this project. The CPU index goes to torch's own command
    # only: an unreachable index would be tried for every package.
    torch = ["--retries", "0", "--extra-index-url", _TORCH_INDEX, _TORCH]
    python = _installed("ray-serve-llm", torch)
    peer = Peer("ray-serve-llm", folder, stack)
    # A socket's path has 107 characters at most, and Ray adds some 70 to this folder's.
    ray_dir = folder / "d"
    ray_dir.mkdir()
    own_token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex()}
    gcs_port, port, model = free_port(), free_port(), options.model or _NAME
    head = [str(python.parent / "ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1"]
    head += [f"--port={gcs_port}", f"--temp-dir={ray_dir}", f"--num-cpus={_RAY_CPUS}"]
    head += ["--include-dashboard=false", "--disable-usage-stats"]
    head += ["--object-store-memory=200000000"]
    # Ports 0 are free ones that the kernel picks, so that no other cluster on this machine is met.
    picked = ("node-manager", "object-manager", "min-worker", "max-worker")
    head += [f"--{name}-port=0" for name in picked]
    listening = ("dashboard-agent-listen", "metrics-export")
    head += [f"--{name}-port={free_port()}" for name in listening]
    app = {
        "model": model,
        "source": _MODEL,
        "port": port,
        "engine": {"dtype": "float32", "enforce_eager": True, "max_model_len": 4096},
    }
    script = str(Path(__file__).with_name("ray_serve_llm_app.py"))
    peer.start(head, **own_token)
    peer.wait(f"port {gcs_port}", lambda: is_taken(gcs_port))
    address = {"RAY_ADDRESS": f"127.0.0.1:{gcs_port}"}
    peer.start([str(python), "-P", script, json.dumps(app)], **own_token, **address)
    return peer.serving(port, model)


def start_ray_direct(options: Namespace, folder: Path, stack: ExitStack) -> System:
    """Ray Serve's direct shape with the simulated engine's tokens, on a Ray of its own."""
    state, port = folder / "direct", free_port()
    state.mkdir()
    ray_cluster.use_token(state / "ray-token")  # another system's names that system's folder
    stack.callback(ray_cluster.sweep, state)  # what an interrupted start leaves
    pid, dashboard_url = ray_cluster.start(
        state, haproxy=True, environment={"PYTHONPATH": str(ROOT)}
    )
    stack.callback(ray_cluster.end, state, pid)
    ray_direct.start_serving(dashboard_url, port, options.replicas)
    url = f"http://127.0.0.1:{port}/v1"
    _wait(f"ray-direct: {url}", lambda: bool(fetch(f"{url}/models")), pid, state / "ray.log")
    marks = (str(state), str(ray_cluster.short_folder(state)))
    return System("ray-direct", url, ray_direct.MODEL, marks)


PEERS: Mapping[str, Callable[[Namespace, Path, ExitStack], System]] = {
    "bare-vllm": start_bare_vllm,
    "vllm-router": start_vllm_router,
    "litellm": start_litellm,
    "ray-serve-llm": start_ray_serve_llm,
    "ray-direct": start_ray_direct,
}


def _wait(what: str, is_ready: Callable[[], bool], pid: int, log: Path) -> None:
    """Return when ``is_ready``; fail when the process ends or the time is over."""
    deadline_s = time.monotonic() + _READY_WITHIN_S
    while not is_ready():
        alive = processes.is_alive(pid)
        if not alive or time.monotonic() > deadline_s:
            why = "did not answer in time" if alive else "ended before it was ready"
            tail = processes.tail(log, 40).replace("\n", "\n    | ")
            raise SystemFailed(f"{what} {why}\n    | {tail}")
        time.sleep(0.25)  # a server tells nobody that it is ready


def _served_model(url: str, api_key: str) -> str:
    """The first model that an endpoint names."""
    page = f"{url.rstrip('/')}/models"
    try:
        return str(json.loads(fetch(page, api_key))["data"][0]["id"])
    except (ValueError, LookupError) as failed:
        raise SystemFailed(f"{page} names no model: {failed}") from failed


def _installed(name: str, *before: Sequence[str]) -> Path:
    """The interpreter of an environment of its own, made when it is missing or its lock file has
    changed.

    Args:
        before: what pip installs before the lock file.
    """
    lock, folder = _HERE / f"{name}.lock", _PEERS / name
    python, stamp = folder / "venv/bin/python", folder / "installed"
    wanted = hashlib.sha256(repr((lock.read_bytes(), before)).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing {lock.name} into {folder} (once) …", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--quiet", "--no-deps"]
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder / "venv")],
        *([*install, *words] for words in before),
        [*install, "--requirement", str(lock)],
    ):
        try:
            subprocess.run(
                command,
                check=True,
                timeout=_INSTALL_TIMEOUT_S,
                env=surroundings.for_packages(Path(sys.executable)),
            )
        except subprocess.CalledProcessError as failed:
            raise SystemFailed(f"{' '.join(command)} ended with {failed.returncode}") from failed
    stamp.write_text(wanted)
    return python
