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


def of_guidellm(*words: str) -> list[str]:
    """The command of a benchmark. Its environment has this project's packages beside its own."""
    python, lock = str(INSTALLED / "guidellm" / "venv" / "bin" / "python"), "requirements.lock"
    made = [sys.executable, "-m", "venv", "venv"]
    pip = [python, "-m", "pip", "install", "--quiet", "--require-hashes", "--no-deps", "-r", lock]
    (folder,) = (installed("guidellm", lock, made, pip) / "venv").glob("lib/python*/site-packages")
    (folder / "beside.pth").write_text(sysconfig.get_path("purelib"))
    return [python, "-m", "guidellm", "run", *words]


def of_codex(url: str, model: str, home: Path, said: Path, *settings: str) -> list[str]:
    """One turn of Codex: what the model has said is written to a file.

    Args:
        home: its own folder for what it keeps.
        settings: more of its provider, as TOML.
    """
    folder = installed("codex", "package-lock.json", [need("npm", "npm"), "ci"])
    provider = [f'base_url = "{url}/v1"', 'name = "hermes"', 'wire_api = "responses"', *settings]
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        f'model_provider = "hermes"\nmodel = "{model}"\n[features]\nplugins = false\n'
        "[model_providers.hermes]\n" + "\n".join(provider) + "\n"
    )
    binary = str(folder / "node_modules" / ".bin" / "codex")
    return [binary, "exec", "--skip-git-repo-check", "-o", str(said), "Say hi"]
