"""The environment `.venv`: of which Python it is made, and that pip and uv install into it,
whatever else the user has told them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from serve_app.local import environment, surroundings
from tests.tables import each

NAME = "hermes_tiny_wheel"
ELSEWHERE = {
    "user": "1",
    "target": "{folder}/elsewhere",
    "prefix": "{folder}/elsewhere",
    "root": "{folder}/elsewhere",
    "constraint": "{folder}/none",
    "requirement": "{folder}/none",
    "no-binary": ":all:",
    "require-hashes": "1",
    "require-virtualenv": "1",
    "dry-run": "1",
    "log": "{folder}/none/log",
}
"""What keeps pip from installing here, or makes it install elsewhere."""
UV_ELSEWHERE = {
    "UV_TARGET": "{folder}/elsewhere",
    "UV_PREFIX": "{folder}/elsewhere",
    "UV_SYSTEM_PYTHON": "1",
    "UV_PYTHON": "{folder}/none",
    "UV_CONSTRAINT": "{folder}/none",
    "UV_NO_BINARY": "1",
    "UV_REQUIRE_HASHES": "1",
    "UV_EXCLUDE_NEWER": "2000-01-01",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a wheel in `wheels` and an environment in `venv`."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "wheels").mkdir()
    with zipfile.ZipFile(folder / "wheels" / f"{NAME}-1-py3-none-any.whl", "w") as wheel:
        info = f"{NAME}-1.dist-info"
        wheel.writestr(f"{NAME}.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", f"{NAME}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    return folder


@pytest.fixture
def venv(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That environment in place of `.venv`, for a user who has configured nothing."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    venv = folder / "venv"
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr(environment, "VENV", venv)
    monkeypatch.setattr(environment, "PYTHON", venv / "bin" / "python")
    return venv


def installed(venv: Path) -> bool:
    """Whether the wheel is in the environment, and remove it."""
    found = [*venv.glob(f"lib/python*/site-packages/{NAME}*")]
    for path in found:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return len(found) == 2


@each("by", ["variables", "[global]", "[install]"])
def test_pip_installs_here_from_where_the_user_has_told_it(
    folder: Path, venv: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    options = {"no-index": "1", "find-links": str(folder / "wheels")}
    options |= {name: value.format(folder=folder) for name, value in ELSEWHERE.items()}
    if by == "variables":
        for name, value in options.items():
            monkeypatch.setenv(f"PIP_{name.upper().replace('-', '_')}", value)
        monkeypatch.setenv("PIP_PYTHON", str(folder / "none"))
    else:
        lines = [by, *(f"{name} = {value}" for name, value in options.items())]
        (folder / "pip.conf").write_text("\n".join(lines))
        monkeypatch.setenv("PIP_CONFIG_FILE", str(folder / "pip.conf"))
    environment._get(None, f"{NAME}==1")
    assert installed(venv)
    assert not (folder / "elsewhere").exists()


def test_so_does_uv(folder: Path, venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        pytest.skip("no uv here; pip installs instead")
    for name, value in UV_ELSEWHERE.items():
        monkeypatch.setenv(name, value.format(folder=folder))
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder / "wheels"))
    assert environment._uv(uv, "--no-index", f"{NAME}==1")
    assert installed(venv)


def test_indexes_proxies_and_certificates_go_on(
    folder: Path, venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "pip.conf").write_text(
        "[global]\nindex-url = https://me:it's@index/simple\ncert = /ca.pem\ntimeout = 9\n"
        "extra-index-url =\n    https://one/simple\n    https://two/simple\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(folder / "pip.conf"))
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("PIP_CERT", "/own.pem")  # goes before the file
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:1")
    monkeypatch.setenv("UV_HTTP_TIMEOUT", "9")
    monkeypatch.setenv("UV_INDEX_OURS_PASSWORD", "secret")
    told = surroundings.for_packages(venv / "bin" / "python")
    wanted = {
        "PIP_INDEX_URL": "https://me:it's@index/simple",
        "PIP_EXTRA_INDEX_URL": "https://one/simple https://two/simple",
        "PIP_TIMEOUT": "9",
        "PIP_CERT": "/own.pem",
        "UV_DEFAULT_INDEX": "https://me:it's@index/simple",
        "SSL_CERT_FILE": "/own.pem",
        "HTTPS_PROXY": "http://proxy:1",
        "UV_HTTP_TIMEOUT": "9",
        "UV_INDEX_OURS_PASSWORD": "secret",
    }
    assert {name: told.get(name) for name in wanted} == wanted


def test_an_environment_is_made_anew_when_its_python_has_gone(
    folder: Path, venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an upgrade of the system, `python3` is another version, or its file is missing."""
    python = venv / "bin" / "python"
    (venv / "hermes-locks").write_text(
        f"{environment._project().name} {environment._digest(environment._project())}\n"
    )
    assert environment.is_ready([])
    assert environment.python().endswith(f"({python})")
    packages = next(venv.glob("lib/python*"))
    packages.rename(venv / "lib" / "python3.4")
    assert not environment.is_ready([])
    (venv / "lib" / "python3.4").rename(packages)
    assert environment.is_ready([])
    with monkeypatch.context() as patch:
        patch.setattr(environment, "PYTHONS", ((3, 98), (3, 99)))
        assert not environment.is_ready([])
    python.unlink()
    python.symlink_to(folder / "none")
    assert not environment.is_ready([])
    environment.mend_venv()
    assert environment._works()
    assert not (venv / "hermes-locks").exists()


GOOD = 'echo "$0"'
NO_VENV = f'case "$2" in *ensurepip*) exit 1 ;; esac; {GOOD}'
TOO_NEW = "exit 1"
SHIM = "exit 127"


@each(
    "found, taken",
    [
        ({"python3.11": GOOD, "python3.12": GOOD, "python3.13": GOOD, "python3": GOOD}, "3.13"),
        ({"python3.11": GOOD, "python3.12": NO_VENV, "python3": NO_VENV}, "3.11"),
        ({"python3.12": NO_VENV, "python3": NO_VENV}, "3.12"),
        ({"python3.13": SHIM, "python3": GOOD}, "3"),
        ({"python3.13": SHIM, "python3": TOO_NEW}, ""),
        ({}, ""),
    ],
)
def test_the_newest_python_that_fits_is_taken(
    tmp_path: Path, found: dict[str, str], taken: str
) -> None:
    folder = tmp_path / f"{len(found)}-{taken}"
    folder.mkdir(exist_ok=True)
    for name, does in found.items():
        (folder / name).write_text(f"#!/bin/sh\n{does}\n")
        (folder / name).chmod(0o755)
    script = f'. {environment.ROOT}/scripts/python.sh; find_python me; echo "$python"'
    bash = shutil.which("bash")
    assert bash is not None
    told = subprocess.run(
        [bash, "-c", script], capture_output=True, text=True, env={"PATH": str(folder)}
    )
    assert told.stdout.strip() == (f"{folder}/python{taken}" if taken else "")
    needed = "me: Python 3.11, 3.12 or 3.13 is needed"
    assert told.stderr.startswith(needed) if not taken else told.stderr == ""
