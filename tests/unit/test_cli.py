"""`hermes` as the wheel and the images have it, and the scripts for the same commands in a
clone.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from serve_app.cli.main import app

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "cluster" / "local_cpu.yaml"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def hermes(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command in this process, because each start takes a second."""
    done = CliRunner().invoke(app, words, prog_name="hermes")
    return subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)


def script(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    return run(str(ROOT / "scripts" / name), *words)


@pytest.mark.parametrize(("words", "tenant"), [(["acme"], "acme"), (["--metrics"], "@metrics")])
def test_a_key_and_its_line_fit_each_other(words: list[str], tenant: str) -> None:
    for done in (hermes("api-key", *words), script("api-key", *words)):
        assert done.returncode == 0
        key = done.stderr.strip().removeprefix("key (it is shown only now): ")
        assert done.stdout == f"{tenant} sha256:{hashlib.sha256(key.encode()).hexdigest()}\n"


@pytest.mark.parametrize("name", ["default", "a:b", "two words", "-leading", ""])
def test_a_name_that_no_tenant_can_have_makes_no_key(name: str) -> None:
    for done in (hermes("api-key", "--", name), script("api-key", name)):
        assert done.returncode == 1
        assert "hk-" not in done.stdout + done.stderr


def test_a_key_can_be_made_before_anything_is_installed() -> None:
    """`-S` leaves out site-packages, as a system's Python would be without them."""
    done = run(sys.executable, "-S", str(ROOT / "scripts" / "api-key"), "acme")
    assert done.returncode == 0, done.stderr


def test_settings_that_cannot_work_are_refused_before_anything_is_uploaded(tmp_path: Path) -> None:
    document = yaml.safe_load(CONFIG.read_text())
    document["applications"][0]["args"]["workers"]["replicas"] = -1
    config = tmp_path / "bad.yaml"
    config.write_text(yaml.safe_dump(document))
    nobody = ("--address", "http://127.0.0.1:1")
    for done in (hermes("deploy", str(config), *nobody), script("deploy", str(config), *nobody)):
        assert done.returncode == 1
        assert "workers.replicas" in done.stderr


def test_a_cluster_that_does_not_answer_is_an_error_of_one_line() -> None:
    done = script("deploy", str(CONFIG), "--address", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "http://127.0.0.1:1" in done.stderr


def test_a_command_line_that_cannot_be_understood_has_status_2() -> None:
    for words in (["deploy"], ["deploy", "missing.yaml"], ["dead-letters", "redrive"]):
        assert hermes(*words).returncode == 2
    assert script("deploy").returncode == 2
    assert script("dead-letters", "redrive", "req_1", "--all").returncode == 2
