"""`hermes-serve` as the wheel and the images have it, and the scripts for the same commands in a
clone.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from serve_app import __version__
from serve_app.cli.main import COMMANDS, app
from tests.tables import each

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "cluster" / "local_cpu.yaml"


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **variables}
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, env=env
    )


def hermes(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command in this process, which has its libraries already."""
    done = CliRunner().invoke(app, words, prog_name="hermes-serve")
    return subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)


HEAVY = ("ray", "vllm", "torch", "fastapi", "starlette", "prometheus_client")
WITH_SETTINGS = ("deploy", "check-redis")
WORDS = [[], ["--version"], ["api-key"], *([name] for name in COMMANDS)]
WORDS += [["requests", "list"], ["dead-letters", "redrive"]]
LOADED = """
import sys
sys.argv = ["hermes-serve", *sys.argv[1:], "--help"]
from serve_app.cli.main import main
try:
    main()
except SystemExit as end:
    print(end.code, *sys.modules, file=sys.stderr)
"""


@each("words", WORDS)
def test_no_command_waits_for_what_it_does_not_need(words: list[str]) -> None:
    done = run(sys.executable, "-c", LOADED, *words)
    code, *modules = done.stderr.split()
    assert code == "0", done.stderr
    assert words == ["--version"] or "Usage: hermes-serve" in done.stdout
    assert not {module.partition(".")[0] for module in modules} & {*HEAVY}
    assert ("serve_app.settings" in modules) == bool({*words} & {*WITH_SETTINGS})


@pytest.mark.clock
@each("words", ["--version", "--help", "requests list", "status", "doctor --help", "up --help"])
def test_a_command_starts_at_once(words: str) -> None:
    """The shortest of ten, because a machine has other work, too."""
    took_s = []
    for _ in range(10):
        began_s = time.perf_counter()
        command = [sys.executable, "-P", "-m", "serve_app.cli.main", *words.split()]
        run(*command, HERMES_URL="http://127.0.0.1:1")
        took_s.append(time.perf_counter() - began_s)
    assert min(took_s) <= 0.3, took_s


def test_every_command_is_in_the_list_with_one_line() -> None:
    shown = hermes("--help").stdout
    for name in (*COMMANDS, "up", "down", "demo", "api-key"):
        assert re.search(rf"^  {name} +\w.+\.$", shown, re.MULTILINE), name
    assert hermes("--version").stdout == f"hermes-serve {__version__}\n"
    assert "No such command 'request'. Did you mean 'requests'?" in hermes("request").stderr


@each("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_their_options(shell: str) -> None:
    def completed(line: str) -> str:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        asked = {"_TYPER_COMPLETE_ARGS": line, "_HERMES_SERVE_COMPLETE": f"complete_{shell}"}
        fish = {"_TYPER_COMPLETE_FISH_ACTION": "get-args"}
        return run(sys.executable, "-m", "serve_app.cli.main", **words, **asked, **fish).stdout

    assert "requests" in completed("hermes-serve req")
    assert "cancel" in completed("hermes-serve requests ")
    assert "--limit" in completed("hermes-serve requests list --li")


def test_what_starts_a_service_gets_its_own_words() -> None:
    """`up` and `down` are quickstart's command line, with its options and its help."""
    command = (sys.executable, "-P", "-m", "serve_app.cli.main")
    assert "--tensor-parallel-size" in run(*command, "up", "--help").stdout
    wrong = run(*command, "up", "--port", "0")
    assert (wrong.returncode, "'0' is no port" in wrong.stderr) == (2, True)
    nothing = run(*command, "down", "--state-dir", "/nonexistent")
    assert (nothing.returncode, nothing.stdout) == (0, "  nothing to stop\n")


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
