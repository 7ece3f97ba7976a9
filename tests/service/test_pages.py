"""The commands of README.md and docs/install.md that no other test runs, as they stand there, but
for ports and folders.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import AuthenticationError, NoPermissionError

from scripts import release
from serve_app.local import ports, processes
from serve_app.local.environment import ROOT, find_redis_server
from tests.documented import INSTALL, README, blocks, line
from tests.service.support import Running
from tests.waiting import until

pytestmark = pytest.mark.nightly  # it concerns documents

PLACE = "http://127.0.0.1:8000"


def run(*words: str | Path, cwd: Path, **variables: str) -> str:
    done = subprocess.run(
        words, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shell(text: str, cwd: Path, **variables: str) -> str:
    return run("bash", "-euc", text, cwd=cwd, **variables)


# -- README.md -----------------------------------------------------------------------------------


def test_the_readmes_request_is_answered(service: Running, tmp_path: Path) -> None:
    told = shell(line(README, "curl -N").replace(PLACE, service.url), tmp_path)
    assert told.rstrip().endswith("data: [DONE]"), told


def test_the_readmes_python_is_answered(service: Running, tmp_path: Path) -> None:
    (code,) = blocks(README, "python")
    code = f"{code.replace(PLACE, service.url)}\nprint(answer.choices[0].message.content)"
    assert run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(ROOT)).strip()


# -- docs/install.md -----------------------------------------------------------------------------


def test_the_pages_wait_ends_when_the_service_is_ready(service: Running, tmp_path: Path) -> None:
    told = shell(line(INSTALL, "until curl").replace(PLACE, service.url), tmp_path)
    assert json.loads(told)["ready"] is True


def test_the_commands_of_the_page_install_the_project(tmp_path: Path) -> None:
    """With the shortest lock file in place of that for GPUs, which takes gigabytes."""
    source = tmp_path / "source"
    release.export(source, seconds=10**9)
    lock = "serve_app/local/locks/gpu.lock"
    block = next(block for block in blocks(INSTALL) if lock in block)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shell(block.replace("gpu.lock", "local.lock"), source, PATH=path)
    asked = (
        "from importlib import metadata as m; print(m.entry_points(group='vllm.general_plugins'))"
    )
    assert "workers.engine_plugin:install" in run(
        source / ".venv" / "bin" / "python", "-I", "-c", asked, cwd=tmp_path
    )
    assert (source / ".venv" / "bin" / "hermes-serve").exists()


def test_the_commands_of_the_page_start_a_redis_with_two_users(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "cluster", tmp_path / "cluster")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "redis-server").symlink_to(str(find_redis_server()))
    port = ports.free_port()
    conf = tmp_path / "cluster" / "redis.conf"
    text = conf.read_text().replace("port 6380\n", f"port {port}\n")
    text = text.replace("/var/lib/redis", str(tmp_path)).replace("/etc/redis", str(tmp_path))
    conf.write_text(f"{text}\npidfile {tmp_path}/pid\n")
    block = next(block for block in blocks(INSTALL) if "redis-server" in block)
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    shell(block.replace("/etc/redis", str(tmp_path)), tmp_path, PATH=path)
    until("it listens", lambda: ports.is_taken(port))
    try:

        def as_user(user: str, file: str) -> Redis:
            password = (tmp_path / file).read_text().strip()
            return Redis(port=port, username=user, password=password, protocol=2)

        with as_user("hermes", "password") as hermes, as_user("ray", "ray-password") as ray:
            assert hermes.xadd("hermes:j:1", {"a": "b"})
            assert ray.hset("RAY1@JOB", "a", "b")
            with pytest.raises(NoPermissionError):
                ray.xadd("hermes:j:1", {"a": "b"})
        with as_user("hermes", "ray-password") as wrong, pytest.raises(AuthenticationError):
            wrong.ping()
        assert (tmp_path / "password").stat().st_mode & 0o077 == 0
    finally:
        processes.end(int((tmp_path / "pid").read_text()))
