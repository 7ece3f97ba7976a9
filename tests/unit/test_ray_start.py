"""`cluster/ray-start` up to the moment at which it would start Ray, with a `ray` that only shows
its options and environment.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from serve_app.local import ports, ray_cluster
from serve_app.local.environment import ROOT
from tests.tables import each

OPTIONS = (
    "--port",
    "--dashboard-port",
    "--ray-client-server-port",
    "--dashboard-agent-listen-port",
)
OF_SERVE = (
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
)


def ray_start(
    folder: Path, role: str, *words: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run it with free ports in place of Ray's, unless `words` or `variables` name others."""
    folder.mkdir(exist_ok=True)
    ray = folder / "ray"
    ray.write_text('#!/bin/sh\necho "$@"\nenv\n')
    ray.chmod(0o755)
    head = [f"{option}={ports.free_port()}" for option in OPTIONS] if role != "node" else []
    environment = {
        **os.environ,
        **{name: str(ports.free_port()) for name in OF_SERVE},
        "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HERMES_STATE": str(folder),
        "RAY_TMPDIR": "/tmp",
        "RAY_AUTH_TOKEN": "0" * 64,
        **variables,
    }
    address = ["h:6379"] if role == "node" else []
    return subprocess.run(
        [ROOT / "cluster" / "ray-start", role, *address, *head, *words],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )


@each(
    "role, name, whose",
    [
        ("alone", "--port", "Ray's GCS"),
        ("head", "--dashboard-port", "Ray's dashboard"),
        ("head", "--ray-client-server-port", "Ray's clients"),
        ("alone", "--dashboard-agent-listen-port", "Ray's agent"),
        ("head", "--node-manager-port", "ray start"),
        ("node", "--metrics-export-port", "ray start"),
        ("alone", "RAY_SERVE_HAPROXY_STATS_PORT", "HAProxy's statistics"),
        ("head", "RAY_SERVE_HAPROXY_METRICS_PORT", "HAProxy's metrics"),
        ("head", "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT", "Serve's proxy behind HAProxy"),
    ],
)
def test_a_port_that_is_taken_is_named_before_ray_starts(
    tmp_path: Path, role: str, name: str, whose: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words, variables = ([name, port], {}) if name.startswith("--") else ([], {name: port})
        told = ray_start(tmp_path, role, *words, **variables)
        helped = ray_start(tmp_path, role, *words, "--help", **variables)
    assert told.returncode == 2
    assert told.stderr.startswith(f"cluster/ray-start: port {port}, for {whose}")
    assert f"set {name} to another" in told.stderr
    assert len(told.stderr.splitlines()) == 1
    assert told.stdout == ""
    assert helped.returncode == 0


def test_ports_of_another_role_or_node_do_not_matter(tmp_path: Path) -> None:
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in OF_SERVE]
        variables = {
            name: str(one.getsockname()[1]) for name, one in zip(OF_SERVE, taken, strict=True)
        }
        told = ray_start(tmp_path, "node", **variables)
        assert told.returncode == 0, told.stderr


def test_quickstart_and_ray_start_tell_ray_the_same(tmp_path: Path) -> None:
    shipped = ray_cluster.shipped_environment()
    assert shipped["RAY_ROTATION_MAX_BYTES"]
    ours = ray_cluster.serve_environment(tmp_path, haproxy=True)
    assert shipped.items() <= ours.items()
    for name in shipped:
        assert name not in os.environ
    told = ray_start(tmp_path, "alone").stdout
    for name, value in shipped.items():
        assert f"\n{name}={value}\n" in told
    other = dict.fromkeys(shipped, "7")
    told = ray_start(tmp_path, "alone", **other).stdout
    for name, value in shipped.items():
        kept = value if name.startswith("RAY_SERVE_") else "7"
        assert f"\n{name}={kept}\n" in told
    for option in ("dashboard-agent-grpc", "runtime-env-agent", "metrics-export"):
        assert f" --{option}-port=2" in told.splitlines()[0]
