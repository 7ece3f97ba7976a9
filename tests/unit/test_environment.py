"""Creating `.venv` from the lock files: after an interruption, and with pip where uv could not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.local import environment

pytestmark = pytest.mark.nightly  # a tool


@pytest.fixture
def venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `.venv` in another place than ours."""
    monkeypatch.setattr(environment, "VENV", tmp_path / "venv")
    monkeypatch.setattr(environment, "PYTHON", tmp_path / "venv" / "bin" / "python")
    return tmp_path / "venv"


def test_a_second_installation_mends_what_an_interrupted_one_has_left(venv: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    environment.mend_venv()
    packages = next(venv.glob("lib/python*/site-packages"))
    assert (packages / "pip").exists(), "it was interrupted before pip came"
    half = packages / "half-1.dist-info"
    half.mkdir()
    environment.mend_venv()
    assert half.exists(), "what was not interrupted stays"
    environment._unfinished().touch()
    environment.mend_venv()
    assert not half.exists(), "uv would take it for installed"


def put_uv_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> Path:
    """Install a fake `uv` that records its arguments. Returns the file."""
    log = folder / "uv.log"
    uv = folder / "uv"
    uv.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexit {status}\n')
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return log


def test_pip_installs_what_uv_could_not(
    venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(environment, "_pip", lambda *words: asked.append(words))
    log = put_uv_on_path(tmp_path, monkeypatch, status=2)
    locks = environment.lock_files("cpu", development=False)
    environment.make_ready(locks)
    torch = ("--extra-index-url", environment.TORCH_CPU_INDEX, "-r", f"{venv}/torch.lock")
    assert " ".join(torch) in log.read_text(), "uv asks torch's own index, too"
    assert asked == [
        ("--retries", "0", *torch),
        *(("-r", str(lock)) for lock in locks),
        ("--no-build-isolation", "--editable", str(environment.ROOT)),
    ]


def test_what_runs_before_the_environment_exists_needs_the_standard_library_alone() -> None:
    """`-S` leaves out site-packages, as a system's Python would be without them."""
    asked = [sys.executable, "-S", "-m", "scripts.local", "--help"]
    done = subprocess.run(asked, cwd=environment.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "scripts/quickstart" in done.stdout
