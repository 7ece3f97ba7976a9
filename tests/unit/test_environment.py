"""Creating `.venv` from the lock files: with uv, with pip, and after an interruption."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.local import environment, ports, preflight

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


def test_a_stamp_that_was_half_written_is_none(venv: Path) -> None:
    locks = environment.lock_files("cpu", development=False)
    assert environment.is_ready(locks) is False
    (venv / "bin").mkdir(parents=True)
    environment.PYTHON.touch()
    (venv / "hermes-locks").write_text("cpu.lock")
    assert environment.is_ready(locks) is False


def test_no_network_and_an_interruption_are_one_sentence_each(
    venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "PYTHON", Path(sys.executable))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(
        SystemExit, match="could not reach the package index: connect this machine, or tell pip"
    ):
        environment._pip("--retries", "0", "no-such-package")

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(environment, "_install", interrupted)
    with pytest.raises(SystemExit, match="interrupted: the same command goes on"):
        environment.make_ready(environment.lock_files("cpu", development=False))


def test_another_processor_and_a_python_without_venv_are_refused_in_a_sentence(
    venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    locks = environment.lock_files("cpu", development=False)
    found = preflight.problems(ports.free_port(), locks, tmp_path)
    assert [problem for problem in found if "x86-64 is needed, not aarch64" in problem]
    assert [problem for problem in found if "apt install python3.11-venv" in problem]


def put_uv_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> Path:
    """Install a fake `uv` that records its arguments. Returns the file."""
    log = folder / "uv.log"
    uv = folder / "uv"
    uv.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexit {status}\n')
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return log


def test_uv_installs_where_it_is_at_hand(
    venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    log = put_uv_on_path(tmp_path, monkeypatch, status=0)
    locks = environment.lock_files("cpu", development=False)
    environment.make_ready(locks)
    into = f"pip install --python {environment.PYTHON} --no-deps"
    assert log.read_text().splitlines() == [
        f"{into} -r {venv}/torch.lock",
        *(f"{into} -r {lock}" for lock in locks),
        f"{into} --no-build-isolation --editable {environment.ROOT}",
    ]
    assert environment.is_ready(locks)
    (tmp_path / "pyproject.toml").write_text("# another plug-in")
    with monkeypatch.context() as changed:
        changed.setattr(environment, "PROJECT", tmp_path / "pyproject.toml")
        assert not environment.is_ready(locks)
    pin, hashed, *_ = (venv / "torch.lock").read_text().splitlines()
    assert pin.startswith("torch==")
    assert "--hash=sha256:" in hashed


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
