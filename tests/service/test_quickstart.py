"""`scripts/quickstart` as a user runs it, with an unrelated home and environment."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from serve_app.local import ports, processes, ray_cluster
from serve_app.local.environment import ROOT
from serve_app.local.service import Service
from tests.service.support import CHAT, answers, asking, of_tenant
from tests.waiting import until

pytestmark = [pytest.mark.disturbs, pytest.mark.timeout(1200)]

STRANGE = "strange-7f3a"  # in every value that must reach nobody
GPUS = 2


def surroundings(folder: Path) -> dict[str, str]:
    """Of a user with a Ray that has a token, a vLLM, a Redis and proxies; and with GPUs, as it
    seems.
    """
    home, modules, tools = folder / "home", folder / STRANGE, folder / "bin"
    (home / ".ray").mkdir(parents=True)
    (home / ".ray" / "auth_token").write_text(f"{STRANGE}{'0' * 52}")
    modules.mkdir()
    for name in ("yaml", "ray", "sitecustomize"):
        (modules / f"{name}.py").write_text("raise SystemExit('a module of the user')\n")
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\n" + 'echo "GPU 0: NVIDIA (UUID: 0)"\n' * GPUS)
    (tools / "nvidia-smi").chmod(0o755)
    proxy = f"http://{STRANGE}.invalid:1"
    return {
        **os.environ,
        "HOME": str(home),
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(modules),
        "PYTHONSTARTUP": str(modules / "yaml.py"),
        "RAY_ADDRESS": f"{STRANGE}:6379",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": STRANGE,
        "VLLM_LOGGING_LEVEL": STRANGE,
        "VLLM_HOST_IP": STRANGE,
        "HERMES_REDIS_URL": f"redis://{STRANGE}.invalid:1/0",
        "OTEL_EXPORTER_OTLP_ENDPOINT": proxy,
        "http_proxy": proxy,
        "HTTPS_PROXY": proxy,
    }


@contextmanager
def quickstart(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Run quickstart in the foreground, with its output in `folder/told`."""
    with (folder / "told").open("w") as told:
        child = subprocess.Popen(
            [ROOT / "scripts" / "quickstart", *words, "--state-dir", folder / "state"],
            env=surroundings(folder),
            stdout=told,
            stderr=told,
            text=True,
            cwd=folder,
        )
        try:
            yield child
        finally:
            child.send_signal(signal.SIGINT)
            child.wait(240)


def test_it_starts_a_service_that_nothing_of_the_users_reaches_and_that_outlives_its_redis(
    alone: None, tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{(port := ports.free_port())}"
    state = tmp_path / "state"
    words = (
        *("--engine", "simulated", "--device", "gpu", "--port", str(port)),
        *("--env", "VLLM_LOGGING_LEVEL=ERROR"),
    )
    with quickstart(tmp_path, *words) as child:

        def told() -> str:
            assert child.poll() is None, (tmp_path / "told").read_text()
            return (tmp_path / "told").read_text()

        until("it is ready", lambda: f"hermes-serve is ready on {url}" in told(), 600)
        service = Service.load(state)
        assert service is not None
        ours = processes.marked("RAY_TMPDIR", str(ray_cluster.short_folder(state)))
        shared = processes.shared_memory(ours)
        answers_to_its_token_alone(service, state / "ray-token")
        reaches_nobody([*ours, *service.pids.values()])
        listens_on_the_loopback_alone([*ours, *service.pids.values()])
        has_an_engine_on_every_gpu(service, state / "ray-token")
        redis_may_be_killed(service, url, told)
        done = subprocess.run(
            [ROOT / "scripts" / "quickstart", "--down", "--state-dir", state],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "ended" in done.stdout
        assert child.wait(240) == 0, (tmp_path / "told").read_text()
    until("not even zombies are left", lambda: not any(Path(f"/proc/{p}").exists() for p in ours))
    assert not ray_cluster.short_folder(state).exists()
    assert not [name for name in shared if (Path("/dev/shm") / name).exists()]


def answers_to_its_token_alone(service: Service, token: Path) -> None:
    assert token.stat().st_mode & 0o777 == 0o600
    jobs = f"{service.dashboard_url}/api/jobs/"
    for key, status in (("", 401), ("f" * 64, 403), (token.read_text(), 200)):
        headers = of_tenant(key) if key else {}
        assert httpx.get(jobs, headers=headers, timeout=60).status_code == status


def reaches_nobody(pids: list[int]) -> None:
    found = {}
    for pid in pids:
        if processes.is_alive(pid):
            variables = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
            found[pid] = [one for one in variables if STRANGE in one]
    assert len(found) > 8
    assert {pid: variables for pid, variables in found.items() if variables} == {}


def listens_on_the_loopback_alone(pids: list[int]) -> None:
    """GCS, raylet, agents, HAProxy, Serve's proxies, replicas and Redis."""
    places = set()
    for pid in filter(processes.is_alive, pids):
        for one in psutil.Process(pid).net_connections("inet"):
            if one.status == psutil.CONN_LISTEN:
                places.add((processes.command_line(pid), one.laddr.ip.removeprefix("::ffff:")))
    assert len(places) > 8
    assert {place for place in places if place[1] != "127.0.0.1"} == set()


def has_an_engine_on_every_gpu(service: Service, token: Path) -> None:
    headers = of_tenant(token.read_text())
    alive = "detail=true&filter_keys=state&filter_predicates=%3D&filter_values=ALIVE"
    found = httpx.get(
        f"{service.dashboard_url}/api/v0/actors?{alive}", headers=headers, timeout=30
    ).json()
    required = [actor["required_resources"] or {} for actor in found["data"]["result"]["result"]]
    assert [one["GPU"] for one in required if "GPU" in one] == [1.0] * GPUS


def redis_may_be_killed(service: Service, url: str, told: Callable[[], str]) -> None:
    done = httpx.post(f"{url}{CHAT}", json=asking(), timeout=120)
    assert done.status_code == 200
    os.kill(service.pids["redis"], signal.SIGKILL)
    until("it says so", lambda: "Redis had ended; it runs again" in told())
    until("requests are answered again", lambda: answers(url))
    kept = httpx.get(f"{url}/v1/requests/{done.headers['x-request-id']}", timeout=120).json()
    assert kept["state"] == "completed", "what was done before stands in the file"


@pytest.mark.nightly  # a second start
def test_what_does_not_start_says_why_and_keeps_its_logs(alone: None, tmp_path: Path) -> None:
    words = ("--engine", "simulated", "--set", "engine.args.nonsense=1")
    with quickstart(tmp_path, *words) as child:
        assert child.wait(480) == 1
    told = (tmp_path / "told").read_text()
    assert "settings:" in told
    logs = Path(told.split("logs: ")[-1].strip())
    assert list(logs.rglob("gcs_server.*")), told
    assert list(logs.rglob("controller_*.log")), told
