"""Who is measured: the service itself, and the peers it is measured against."""

import json
import os
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.request import ProxyHandler, Request, build_opener

from scripts.local import surroundings
from scripts.local.ports import free_port

from .arguments import TINY_MODEL
from .children import Family
from .errors import SystemFailed
from .options import Options
from .peer_venv import ensure_ray_serve_llm
from .processes import Scope

REPOSITORY = Path(__file__).resolve().parents[2]
_CPU_ENGINE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
# Ray counts logical CPUs and would wait for ever for more than the machine has.
_RAY_CPUS = 16


@dataclass
class System:
    """An endpoint and the processes behind it; ``family`` is set when the bench started them."""

    name: str
    url: str
    model: str
    scope: Scope
    family: Family | None = None
    state_dir: Path | None = None
    process_port: int = 0
    """First port of the metrics pages of the service's processes; 0 if they have none."""

    def end(self) -> None:
        """End what the bench started, and nothing else."""
        if self.family is None:
            return
        try:
            if self.state_dir is not None:
                down = [
                    str(REPOSITORY / "scripts/quickstart"),
                    "--down",
                    "--state-dir",
                    str(self.state_dir),
                ]
                self.family.run(down, _environment(), timeout_s=60)
        except SystemFailed as failed:
            print(failed, file=sys.stderr)
        finally:
            killed = self.family.end()
        if killed and self.state_dir is not None:
            print(
                f"{self.name}: {killed} processes did not end when asked and were killed",
                file=sys.stderr,
            )


def existing(options: Options) -> System:
    """The service that runs already under ``--url``."""
    model = options.model or served_model(options.url, options.api_key)
    scope = Scope(roots=frozenset(options.root_pids), marks=tuple(options.match))
    return System(options.name, options.url, model, scope)


def start_own(options: Options, folder: Path) -> System:
    """This repository's service with one engine replica, by ``scripts/quickstart``."""
    family = Family(options.name, folder)
    port, state_dir = free_port(), folder / "state"
    system = System(
        options.name, f"http://127.0.0.1:{port}/v1", "", family.scope, family, state_dir
    )
    command = [
        str(REPOSITORY / "scripts/quickstart"),
        "--detach",
        "--replicas",
        "1",
        "--ingress-replicas",
        "1",
    ]
    command += ["--port", str(port), "--state-dir", str(state_dir)]
    command += [
        "--kept-logs",
        str(REPOSITORY / ".hermes" / "bench-logs"),
    ]  # the state folder does not stay
    if options.order:
        system.process_port = free_port()
        command += ["--set", f"telemetry.process_port={system.process_port}"]
    for setting in options.settings:
        command += ["--set", setting]
    if options.model_path != TINY_MODEL:
        command += ["--model", options.model_path]
    try:
        family.run(command, _environment(), options.ready_timeout_s)
        system.model = options.model or served_model(system.url, options.api_key)
    except BaseException:
        system.end()
        raise
    system.scope = Scope(family.scope.roots, (*family.scope.marks, str(state_dir)))
    return system


def start_bare_vllm(options: Options, folder: Path) -> System:
    """vLLM's own server, alone."""
    family, port = Family("bare-vllm", folder), free_port()
    model = options.model or "bench-model"
    # The module and not the `vllm` command, which fails under the CPU distribution's other name.
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        options.model_path,
    ]
    command += ["--served-model-name", model, "--host", "127.0.0.1", "--port", str(port)]
    command += _engine_flags(options.engine_args)
    return _serve(family, command, _environment() | _sockets(folder), port, model, options)


def start_ray_serve_llm(options: Options, folder: Path, *, tuned: bool = False) -> System:
    """Ray Serve LLM on a Ray head of its own: its defaults, or (``tuned``) HAProxy and throughput
    options.
    """
    python = ensure_ray_serve_llm(REPOSITORY / ".hermes/peers/ray-serve-llm")
    family = Family("ray-serve-llm-tuned" if tuned else "ray-serve-llm", folder)
    # A socket's path has 107 characters at most (HAProxy: 97), and Ray adds some 70 to this
    # folder's.
    ray_dir = folder / ("t" if tuned else "d")
    ray_dir.mkdir()
    own_token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex()}
    environment = (
        _environment() | _sockets(folder) | own_token | (_tuning(ray_dir) if tuned else {})
    )
    gcs_port, port = free_port(), free_port()
    model = options.model or "bench-model"
    head = [str(python.parent / "ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1"]
    head += [
        f"--port={gcs_port}",
        f"--temp-dir={ray_dir}",
        f"--num-cpus={_RAY_CPUS}",
        "--include-dashboard=false",
    ]
    head += ["--disable-usage-stats", "--object-store-memory=200000000"]
    # Ports 0 are free ones that the kernel picks, so that no other cluster on this machine is met.
    head += [
        f"--{name}-port=0"
        for name in ("node-manager", "object-manager", "min-worker", "max-worker")
    ]
    head += [
        f"--{name}-port={free_port()}" for name in ("dashboard-agent-listen", "metrics-export")
    ]
    try:
        child = family.start(head, environment)
        family.wait_for_port(gcs_port, child, options.ready_timeout_s)
    except BaseException:
        family.end()
        raise
    application = {
        "model": model,
        "source": options.model_path,
        "port": port,
        "engine": options.engine_args,
    }
    command = [
        str(python),
        str(Path(__file__).with_name("ray_serve_llm_app.py")),
        json.dumps(application),
    ]
    environment["RAY_ADDRESS"] = f"127.0.0.1:{gcs_port}"
    return _serve(family, command, environment, port, model, options)


def _serve(
    family: Family,
    command: list[str],
    environment: dict[str, str],
    port: int,
    model: str,
    options: Options,
) -> System:
    url = f"http://127.0.0.1:{port}/v1"
    try:
        child = family.start(command, environment)
        family.wait_for(f"{url}/models", child, options.ready_timeout_s)
    except BaseException:
        family.end()
        raise
    return System(family.name, url, model, family.scope, family)


def _environment() -> dict[str, str]:
    """What describes this machine, and small CPU engines."""
    return surroundings.kept(os.environ) | _CPU_ENGINE


def _sockets(folder: Path) -> dict[str, str]:
    """vLLM's go with the bench's folder, and do not stay in the machine's temporary one."""
    return {"VLLM_RPC_BASE_PATH": str(folder)}


def _tuning(ray_dir: Path) -> dict[str, str]:
    # HAProxy's files lie in one fixed folder by default, where two services of one machine collide.
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(ray_dir / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(ray_dir / "s"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(ray_dir),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(ray_dir / "haproxy.state"),
    }


def _engine_flags(engine_args: dict[str, object]) -> list[str]:
    flags: list[str] = []
    for name, value in engine_args.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif value is not False:
            flags += [flag, str(value)]
    return flags


def served_model(url: str, api_key: str) -> str:
    """The first model that an endpoint names."""
    request = Request(f"{url.rstrip('/')}/models", headers={"authorization": f"Bearer {api_key}"})
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=10) as response:
            return str(json.load(response)["data"][0]["id"])
    except (OSError, ValueError, LookupError) as failed:
        raise SystemFailed(f"{request.full_url} names no model: {failed}") from failed
