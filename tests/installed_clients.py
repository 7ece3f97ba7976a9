"""Clients as their users install them: each has a folder in `tests/clients`, and is installed from
its lock file below `.hermes`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from serve_app.local.environment import ROOT
from tests import documented

SCRIPTS = ROOT / "tests" / "clients"
INSTALLED = ROOT / ".hermes" / "clients"
ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "HOME": str(INSTALLED),
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would fetch a list at its start
}


def cannot(why: str) -> None:
    """The client cannot be run on this machine."""
    pytest.fail(why) if os.environ.get("CI") == "true" else pytest.skip(why)


def need(program: str, package: str) -> str:
    """The path of a program."""
    found = shutil.which(program)
    if found is None:
        cannot(f"`{program}` is not on PATH (Debian: apt install {package})")
    return str(found)


def installed(name: str, lock: str, *commands: list[str]) -> Path:
    """The folder below `.hermes` with a client's files, in which these commands have been run,
    once for each version of its lock file.
    """
    source, folder = SCRIPTS / name, INSTALLED / name
    stamp, digest = folder / "installed", hashlib.sha256((source / lock).read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != digest:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        for command in commands:
            ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
            if ran.returncode:
                said = " ".join(f"{ran.stdout}{ran.stderr}".split())[-300:]
                cannot(f"{name} cannot be installed; `{' '.join(command[:4])}` says: {said}")
        stamp.write_text(digest)
    shutil.copytree(source, folder, dirs_exist_ok=True)
    return folder


def of_node(name: str, script: str = "main.js") -> list[str]:
    """The command of a client for Node."""
    node, npm = need("node", "nodejs"), need("npm", "npm")
    return [
        node,
        str(installed(name, "package-lock.json", [npm, "ci", "--ignore-scripts"]) / script),
    ]


def python(name: str = "python", lock: str = "requirements.lock") -> Path:
    """The interpreter of a client's own environment; by default that of the clients for Python."""
    made = INSTALLED / name / "venv" / "bin" / "python"
    pip = f"{made} -m pip install --quiet --require-hashes --no-deps -r {lock}"
    installed(name, lock, [sys.executable, "-m", "venv", "venv"], pip.split())
    return made


def of_litellms_proxy() -> list[str]:
    """The command of LiteLLM's proxy, by the lock file of what is measured beside the service."""
    lock = ROOT / "scripts" / "benchmark" / "gateways.lock"
    return [str(python("litellm-proxy", str(lock)).parent / "litellm")]


def of_guidellm(*words: str) -> list[str]:
    """The command of a benchmark. Its environment has this project's packages beside its own."""
    interpreter = python("guidellm")
    (folder,) = interpreter.parents[1].glob("lib/python*/site-packages")
    (folder / "beside.pth").write_text(sysconfig.get_path("purelib"))
    return [str(interpreter), "-m", "guidellm", "run", *words]


def of_anthropics_tests() -> tuple[list[str], Path]:
    """The command that runs tests of Anthropic's SDK, and the folder to run it in: they are in the
    SDK's source distribution, which a wheel lacks.
    """
    interpreter = python("anthropic-tests")
    folder = INSTALLED / "anthropic-tests"
    unpacked = folder / "source"
    if not unpacked.exists():
        only = "--no-deps --no-binary :all: --require-hashes -r tests.lock -d downloaded"
        words = [str(interpreter), "-m", "pip", "download", "--quiet", *only.split()]
        ran = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=900)
        if ran.returncode:
            cannot(f"the tests of Anthropic's SDK cannot be had: {ran.stderr[-300:]}")
        (packed,) = (folder / "downloaded").glob("anthropic-*.tar.gz")
        shutil.unpack_archive(packed, unpacked, filter="data")
    (source,) = unpacked.iterdir()
    return [str(interpreter), "-m", "pytest", "-q", "-n0"], source


def of_agent(
    name: str, url: str, model: str, home: Path, prompt: str = "Say hi"
) -> tuple[list[str], dict[str, str]]:
    """The command of an agent that is set up as docs/agents.md says, and its environment.

    Args:
        home: its own folder, which gets its configuration.
    """
    told = documented.section(documented.AGENTS, name)
    for shown, used in (("http://127.0.0.1:8000", url), ("hermes-tiny", model), ("Say hi", prompt)):
        told = told.replace(shown, used)
    for path, text in documented.files(told):
        file = home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    environment = {**ENVIRONMENT, "HOME": str(home), "KEY": "none"}
    if code := documented.blocks_of(told, "python"):
        return [str(python()), "-c", *code], environment
    folder = installed("agents", "package-lock.json", [need("npm", "npm"), "ci"]) / "node_modules"
    binaries = [str(folder / ".bin"), str(folder / "opencode-linux-x64" / "bin")]
    last = str(python("hermes-agent").parent)
    environment["PATH"] = os.pathsep.join([*binaries, ENVIRONMENT["PATH"], last])
    return ["bash", "-euc", *documented.blocks_of(told)], environment
