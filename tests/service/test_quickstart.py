"""`scripts/quickstart`, as it is typed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import httpx
import pytest

from scripts.local import processes, ray_cluster
from scripts.local.environment import ROOT
from scripts.local.service import Service
from tests.service.services import Services

pytestmark = [pytest.mark.disturbs, pytest.mark.timeout(400)]


def quickstart(*words: str) -> str:
    done = subprocess.run([ROOT / "scripts" / "quickstart", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_starts_a_service_whose_ray_obeys_nobody_else_and_ends_it(alone: None, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{(port := processes.free_port())}"
    told = quickstart("--engine", "simulated", "--port", str(port), "--state-dir", str(tmp_path), "--detach")
    try:
        assert f"hermes-serve is ready on {url}" in told
        body = {"model": "hermes-tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30).status_code == 200
        service = Service.load(tmp_path)
        assert service is not None
        token = tmp_path / "ray-token"
        assert token.stat().st_mode & 0o777 == 0o600
        jobs = f"{service.dashboard_url}/api/jobs/"
        assert httpx.get(jobs).status_code == 401
        assert httpx.get(jobs, headers={"authorization": "Bearer " + "f" * 64}).status_code == 403
        assert httpx.get(jobs, headers={"authorization": f"Bearer {token.read_text()}"}).status_code == 200
    finally:
        assert "ended" in quickstart("--down", "--state-dir", str(tmp_path))
    assert processes.marked("RAY_TMPDIR", str(ray_cluster.short_folder(tmp_path))) == []


@pytest.fixture
def alone(services: Services) -> None:
    services.end()  # memory is for one service
