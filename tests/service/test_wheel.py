"""The wheel in an empty environment, without this repository: `hermes-serve` operates, and starts a
service.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts import release
from serve_app import __version__
from serve_app.local import ports
from tests.service.support import CHAT, asking

# A release property; every environment takes gigabytes and minutes.
pytestmark = [pytest.mark.nightly, pytest.mark.disturbs, pytest.mark.timeout(1800)]

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
ASKED = "import ensurepip, sys, venv; print(sys.executable)"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "out").mkdir()
    release.export(folder / "source", seconds=10**9)
    return release.packages(folder / "source", folder / "out", seconds=10**9)


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_an_installed_wheel_starts_and_operates_a_service(
    version: str, wheel: Path, alone: None, tmp_path: Path
) -> None:
    try:
        asked = subprocess.run(
            [f"python{version}", "-c", ASKED], cwd=tmp_path, capture_output=True, text=True
        )
    except FileNotFoundError:
        pytest.skip(f"no python{version} on PATH")
    if asked.returncode:
        pytest.skip(f"python{version} has no venv")
    bin_folder = tmp_path / "venv" / "bin"
    subprocess.run([asked.stdout.strip(), "-m", "venv", tmp_path / "venv"], check=True)
    subprocess.run([bin_folder / "pip", "install", "--quiet", wheel], check=True)
    assert not (bin_folder / "ray").exists()

    def hermes(*words: str, status: int = 0) -> str:
        done = subprocess.run(
            [bin_folder / "hermes-serve", *words],
            env={**os.environ, "XDG_DATA_HOME": str(tmp_path / "data")},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == status, (words, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        return done.stdout or done.stderr

    assert hermes("--version") == f"hermes-serve {__version__}\n"
    assert hermes("deploy", __file__, status=1).endswith("pip install 'hermes-serve[serve]'\n")
    port = ports.free_port()
    url = f"http://127.0.0.1:{port}"
    try:
        began = hermes("up", "--engine", "simulated", "--detach", "--port", str(port))
        assert f"hermes-serve is ready on {url} " in began
        assert "hermes-serve up --down ends it" in began
        assert httpx.post(f"{url}{CHAT}", json=asking(), timeout=60).status_code == 200
        operates(hermes, url)
    except AssertionError as error:
        if "pip failed" in str(error) and version != HERE:
            pytest.skip(f"the packages for python{version} cannot be had")
        raise
    finally:
        ended = hermes("down")
    assert ended == "  ended\n"
    assert hermes("status", "--url", url, status=1).startswith(f"status: {url} does not answer: ")
    assert hermes("down") == "  nothing to stop\n"


def operates(hermes: Any, url: str) -> None:
    """Every command finds the service that runs, without being told where."""
    status = json.loads(hermes("status", "--json"))
    assert (status["url"], status["ready"], status["workers"]) == (url, True, 2)
    listed = [json.loads(line) for line in hermes("requests", "list", "--json").splitlines()]
    assert [one["state"] for one in listed] == ["completed", "completed"], "and the one of `up`"
    assert hermes("requests", "tail", listed[0]["id"]).strip()
    assert hermes("usage").splitlines()[-1].split()[:2] == ["total", "2"]
    assert hermes("dead-letters", "list") == "no dead letters\n"
    assert hermes("check-redis") == "Redis: usable\n"
    port = url.rpartition(":")[2]
    found = {one["check"]: one for one in json.loads(hermes("doctor", "--json", "--port", port))}
    assert found["service"]["fact"] == f"{url} is ready"
    assert found["packages"]["fact"].startswith("ray 2")
