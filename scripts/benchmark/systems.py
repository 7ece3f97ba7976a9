"""Who is measured: the service itself, and the peers it is measured against. What is started here
is always ended: exactly that and what descends from it, by pid, never by name.
"""

import hashlib
import json
import os
import secrets
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from scripts.local import processes, ray_cluster, surroundings
from scripts.local.ports import free_port, is_taken

from . import ray_direct
from .client import fetch
from .errors import SystemFailed
from .options import TINY_MODEL, Options
from .processes import Scope

REPOSITORY = Path(__file__).resolve().parents[2]
_LOCK = Path(__file__).with_name("ray-serve-llm.lock")
_TORCH = "torch==2.13.0"
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_MARK = "HERMES_BENCH_MARK"
_CPU_ENGINE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
# Ray counts logical CPUs and would wait for ever for more than the machine has.
_RAY_CPUS = 16
_DOWN_TIMEOUT_S = 60.0
_INSTALL_TIMEOUT_S = 1800


class Family:
    """The processes of one system; an environment variable that they inherit finds those that
    daemonised.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        self._environment = surroundings.kept(os.environ) | _CPU_ENGINE | {_MARK: uuid.uuid4().hex}
        # vLLM's sockets go with the folder, and do not stay in the machine's temporary one.
        self._environment["VLLM_RPC_BASE_PATH"] = str(folder)
        self._started: list[int] = []

    @property
    def scope(self) -> Scope:
        """Everything this family has started."""
        return Scope(frozenset(self._started), (f"{_MARK}={self._environment[_MARK]}",))

    def start(self, command: Sequence[str], more: Mapping[str, str] | None = None) -> int:
        """Start ``command`` with ``more`` in its environment; returns its pid."""
        environment = self._environment | dict(more or {})
        self._started.append(processes.start(command, self._log, environment, REPOSITORY))
        return self._started[-1]

    def run(self, command: Sequence[str], timeout_s: float) -> None:
        """Run ``command`` to its end, which must be a good one."""
        with self._log.open("ab") as log:
            try:
                code = subprocess.run(
                    command,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    timeout=timeout_s,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                raise self._failure(f"{command[0]} took more than {timeout_s:.0f} s") from None
        if code != 0:
            raise self._failure(f"{' '.join(command)} ended with {code}")

    def wait(self, what: str, is_ready: Callable[[], bool], pid: int, timeout_s: float) -> None:
        """Return when ``is_ready``; fail when the process ends or the time is over."""
        deadline_s = time.monotonic() + timeout_s
        while not is_ready():
            if time.monotonic() > deadline_s:
                raise self._failure(f"{what} did not answer within {timeout_s:.0f} s")
            if not processes.is_alive(pid):
                raise self._failure("it ended before it was ready")
            time.sleep(0.25)  # a server tells nobody that it is ready

    def end(self) -> None:
        """End the whole family."""
        for pid in reversed(self._started):
            processes.end(pid)
        for pid in processes.marked(_MARK, self._environment[_MARK]):
            processes.end(pid)

    def _failure(self, reason: str) -> SystemFailed:
        tail = processes.tail(self._log, 40).replace("\n", "\n    | ")
        return SystemFailed(f"{self.name}: {reason}\n    | {tail}")


@dataclass
class System:
    """An endpoint and the processes behind it; ``end`` ends what the bench started, and nothing
    else.
    """

    name: str
    url: str
    model: str
    scope: Scope
    end: Callable[[], None] = lambda: None
    pages: list[str] = field(default_factory=list)
    """Where the engine's metrics may be."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        self.pages = self.pages or [f"{parts.scheme}://{parts.netloc}/metrics"]


def existing(options: Options) -> System:
    """The service that runs already under ``--url``."""
    model = options.model or _served_model(options.url, options.api_key)
    scope = Scope(frozenset(options.root_pids), options.match)
    return System("hermes-serve", options.url, model, scope)


def start_own(options: Options, folder: Path) -> System:
    """This repository's service, by ``scripts/quickstart``; beside ray-direct with the simulated
    engine, whose tokens that peer has, too.
    """
    family = Family("hermes-serve", folder)
    port, state_dir = free_port(), folder / "state"
    quickstart = [str(REPOSITORY / "scripts/quickstart"), "--state-dir", str(state_dir)]
    command = [*quickstart, "--detach"]
    command += ["--replicas", str(options.replicas), "--ingress-replicas", str(options.replicas)]
    # The state folder does not stay.
    command += ["--port", str(port), "--kept-logs", str(REPOSITORY / ".hermes/bench-logs")]
    # The engine's metrics are read five times a second where a table has them.
    fresh = (
        ("telemetry.snapshot_period_s=0.2", "telemetry.page_period_s=0")
        if options.order or options.batching
        else ()
    )
    simulated = (
        ("engine.kind=simulated", f"engine.args.tokens_per_s={ray_direct.TOKENS_PER_S}")
        if "ray-direct" in options.against
        else ()
    )
    for setting in (*fresh, *simulated, *options.settings):
        command += ["--set", setting]
    if options.model_path != TINY_MODEL:
        command += ["--model", options.model_path]

    def end() -> None:
        try:
            family.run([*quickstart, "--down"], _DOWN_TIMEOUT_S)
        except SystemFailed as failed:
            print(failed, file=sys.stderr)
        finally:
            family.end()

    url = f"http://127.0.0.1:{port}/v1"
    try:
        family.run(command, options.ready_timeout_s)
        model = options.model or _served_model(url, options.api_key)
    except BaseException:
        end()
        raise
    scope = Scope(family.scope.roots, (*family.scope.marks, str(state_dir)))
    return System(family.name, url, model, scope, end)


def start_bare_vllm(options: Options, folder: Path) -> System:
    """vLLM's own server, alone."""
    family, port, model = Family("bare-vllm", folder), free_port(), options.model or "bench-model"
    # The module and not the `vllm` command, which fails under the CPU distribution's other name.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", options.model_path, "--served-model-name", model]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    for name, value in options.engine_args.items():
        if value is not False:
            command.append(f"--{name.replace('_', '-')}")
            command += [] if value is True else [str(value)]
    return _serving(family, lambda: family.start(command), port, model, options)


def start_ray_serve_llm(options: Options, folder: Path) -> System:
    """Ray Serve LLM with its defaults, on a Ray head of its own."""
    python = _ensure_ray_serve_llm(REPOSITORY / ".hermes/peers/ray-serve-llm")
    family = Family("ray-serve-llm", folder)
    # A socket's path has 107 characters at most, and Ray adds some 70 to this folder's.
    ray_dir = folder / "d"
    ray_dir.mkdir()
    own_token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex()}
    gcs_port, port, model = free_port(), free_port(), options.model or "bench-model"
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
        "source": options.model_path,
        "port": port,
        "engine": options.engine_args,
    }
    script = str(Path(__file__).with_name("ray_serve_llm_app.py"))
    command = [str(python), "-P", script, json.dumps(app)]

    def start() -> int:
        pid = family.start(head, own_token)
        what = f"port {gcs_port}"
        family.wait(what, lambda: is_taken(gcs_port), pid, options.ready_timeout_s)
        return family.start(command, own_token | {"RAY_ADDRESS": f"127.0.0.1:{gcs_port}"})

    return _serving(family, start, port, model, options)


def start_ray_direct(options: Options, folder: Path) -> System:
    """Ray Serve's direct shape with the simulated engine's tokens, on a Ray of its own."""
    state, port = folder / "direct", free_port()
    state.mkdir()
    pid = ray_direct.start_ray(state, port, options.replicas)
    scope = Scope(marks=(str(state), str(ray_cluster.short_folder(state))))
    url = f"http://127.0.0.1:{port}/v1"
    system = System("ray-direct", url, ray_direct.MODEL, scope, lambda: ray_cluster.end(state, pid))
    deadline_s = time.monotonic() + options.ready_timeout_s
    while not fetch(f"{url}/models"):
        if time.monotonic() > deadline_s:
            system.end()
            raise SystemFailed(f"ray-direct did not answer\n{processes.tail(state / 'ray.log')}")
        time.sleep(0.25)  # a server tells nobody that it is ready
    return system


def _serving(
    family: Family, start: Callable[[], int], port: int, model: str, options: Options
) -> System:
    """A system that is ready when it lists its models."""
    url = f"http://127.0.0.1:{port}/v1"
    try:
        pid = start()
        ready = f"{url}/models"
        family.wait(ready, lambda: bool(fetch(ready)), pid, options.ready_timeout_s)
    except BaseException:
        family.end()
        raise
    return System(family.name, url, model, family.scope, family.end)


def _served_model(url: str, api_key: str) -> str:
    """The first model that an endpoint names."""
    page = f"{url.rstrip('/')}/models"
    try:
        return str(json.loads(fetch(page, api_key))["data"][0]["id"])
    except (ValueError, LookupError) as failed:
        raise SystemFailed(f"{page} names no model: {failed}") from failed


def _ensure_ray_serve_llm(folder: Path) -> Path:
    """Ray Serve LLM is pinned to another vLLM than this project, so it gets an environment of its
    own: the interpreter of that below ``folder``, made when missing or when the lock has changed.
    """
    python, stamp = folder / "venv/bin/python", folder / "installed"
    wanted = hashlib.sha256(_LOCK.read_bytes() + _TORCH.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing Ray Serve LLM with its own vLLM into {folder} (once) …", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--quiet", "--no-deps"]
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder / "venv")],
        # The CPU index goes to torch's own command only: an unreachable index would be tried for
        # every package.
        [*install, "--retries", "0", "--extra-index-url", _TORCH_INDEX, _TORCH],
        [*install, "--requirement", str(_LOCK)],
    ):
        try:
            subprocess.run(command, check=True, timeout=_INSTALL_TIMEOUT_S)
        except subprocess.CalledProcessError as failed:
            raise SystemFailed(f"{' '.join(command)} ended with {failed.returncode}") from failed
    stamp.write_text(wanted)
    return python
