"""`scripts/deploy` uploads the code to a running Ray cluster that has only Ray and vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from serve_app.local import ports, processes, ray_cluster, redis_server
from serve_app.local.environment import ROOT, VENV
from tests.service.support import CHAT, asking

# A release property.
pytestmark = pytest.mark.nightly

NOT_OURS = ("redis", "hiredis", "fastapi_offline", "hermes", "__editable__", "_hermes")


@pytest.fixture
def bare_ray(tmp_path: Path) -> Path:
    """The `ray` of an environment like ours, but for the project and the libraries that only it
    brings.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    packages = next((tmp_path / "bare").glob("lib/python*/site-packages"))
    for entry in next(VENV.glob("lib/python*/site-packages")).iterdir():
        if not entry.name.lower().startswith(NOT_OURS) and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    ray = tmp_path / "bare" / "bin" / "ray"
    ray.write_text(f"#!{tmp_path}/bare/bin/python\nfrom ray.scripts.scripts import main\nmain()\n")
    ray.chmod(0o755)
    for module, known in (("ray", True), ("vllm", True), ("redis", False), ("serve_app", False)):
        words = [str(tmp_path / "bare" / "bin" / "python"), "-c", f"import {module}"]
        assert (subprocess.call(words, cwd=tmp_path) == 0) is known, module
    return ray


@pytest.fixture
def cluster(bare_ray: Path, tmp_path: Path) -> Iterator[str]:
    """The dashboard of a private Ray in that environment."""
    state = tmp_path / "state"
    state.mkdir()
    redis = redis_server.start(tmp_path / "redis")
    environment = {"HERMES_REDIS_URL": redis.url(), "PYTHONPATH": ""}
    try:
        pid, dashboard = ray_cluster.start(state, False, environment, bare_ray)
        try:
            yield dashboard
        finally:
            ray_cluster.end(state, pid)
    finally:
        processes.end(redis.pid)


@pytest.mark.timeout(1200)
def test_the_code_travels_to_a_cluster_that_has_only_ray_and_vllm(
    cluster: str, tmp_path: Path
) -> None:
    port = ports.free_port()
    document = yaml.safe_load((ROOT / "cluster" / "local_cpu.yaml").read_text())
    document["http_options"]["port"] = port
    document["applications"][0]["args"]["workers"]["replicas"] = 1
    (tmp_path / "here.yaml").write_text(yaml.safe_dump(document))
    rendered = tmp_path / "rendered.yaml"
    scripts_deploy = [str(ROOT / "scripts" / "deploy"), str(tmp_path / "here.yaml")]
    to_the_cluster = ["--address", cluster]
    subprocess.run([*scripts_deploy, *to_the_cluster, "--render", str(rendered)], check=True)
    serve_deploy = [str(VENV / "bin" / "serve"), "deploy", *to_the_cluster, str(rendered)]
    subprocess.run(serve_deploy, check=True, env={**os.environ, "PYTHONPATH": ""}, cwd=tmp_path)
    subprocess.run([*scripts_deploy, *to_the_cluster], check=True)
    answer = httpx.post(f"http://127.0.0.1:{port}{CHAT}", json=asking(), timeout=240)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-hermes-engine"].startswith("vllm-")
    assert answer.json()["usage"]["completion_tokens"] > 0
