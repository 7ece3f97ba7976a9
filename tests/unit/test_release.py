"""`scripts/release`: the same commit gives the same bytes, and each part can be used alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import helm_python
import pytest
from fastapi.openapi.models import OpenAPI

from scripts import release
from serve_app import __version__
from serve_app.local.environment import LOCKS, ROOT


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release") / "dist"
    release.make(folder)
    return folder


def unpacked(file: Path, folder: Path) -> Path:
    with tarfile.open(file) as tar:
        tar.extractall(folder, filter="data")
    (found,) = folder.iterdir()
    return found


@pytest.mark.nightly
def test_it_is_the_same_when_it_is_made_again(made: Path, tmp_path: Path) -> None:
    """By another process, whose umask, time zone and order of sets differ."""
    code = (
        "import pathlib, sys; from scripts import release; release.make(pathlib.Path(sys.argv[1]))"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        umask=0o077,
        cwd=ROOT,
        env={**os.environ, "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7"},
        check=True,
    )
    assert sorted(file.name for file in made.iterdir()) == sorted(os.listdir(tmp_path))
    for file in made.iterdir():
        assert file.read_bytes() == (tmp_path / file.name).read_bytes(), file.name


def test_the_hashes_are_those_of_every_other_file(made: Path) -> None:
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=made, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    checked = {line.partition(":")[0] for line in done.stdout.splitlines()}
    assert checked | {"SHA256SUMS"} == {file.name for file in made.iterdir()}


@pytest.mark.nightly
def test_the_wheel_of_the_source_archive_is_the_wheel(made: Path, tmp_path: Path) -> None:
    (wheel,) = made.glob("*.whl")
    source = unpacked(made / f"hermes_serve-{__version__}.tar.gz", tmp_path)
    release.packages(source, tmp_path, 10**9)
    with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(tmp_path / wheel.name) as of_source:
        assert [one.filename for one in ours.infolist()] == of_source.namelist()
        for one in ours.infolist():
            assert ours.read(one) == of_source.read(one.filename), one.filename
        assert ours.getinfo("serve_app/local/cluster/haproxy-start").external_attr >> 16 & 0o111


def test_helm_takes_the_chart(made: Path) -> None:
    (file,) = made.glob("hermes-serve-*.tgz")
    with helm_python.Chart.load_archive(file.read_bytes()) as chart:
        assert file.name == f"hermes-serve-{chart.version}.tgz"
        assert chart.metadata["appVersion"] == __version__
        assert len(chart.templates) > 10


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_everything_that_an_image_copies_lies_beside_its_recipe(
    device: str, made: Path, tmp_path: Path
) -> None:
    folder = unpacked(made / f"images-{__version__}.tar.gz", tmp_path)
    recipe = (folder / "cluster" / "docker" / f"{device}.Dockerfile").read_text()
    copied = re.findall(r"^COPY (?!--from)(?:--\S+ )?(.+) \S+$", recipe, re.MULTILINE)
    assert len(copied) == 3, "the wheel, the lock file, HAProxy's start"
    for name in copied:
        assert (folder / name).is_file(), name
    assert "pip wheel" not in recipe
    assert (folder / copied[0]).read_bytes() == (made / copied[0]).read_bytes()


def test_the_api_is_described_as_the_service_describes_it(made: Path) -> None:
    document = json.loads((made / "openapi.json").read_text())
    OpenAPI.model_validate(document)
    assert document["info"]["version"] == __version__
    paths = {"/v1/chat/completions", "/v1/responses", "/v1/requests/{request_id}", "/v1/usage"}
    assert paths <= set(document["paths"])


@pytest.mark.parametrize("name", release.BILLS)
def test_a_bill_of_materials_has_every_pin_with_its_hashes(name: str, made: Path) -> None:
    lock = (LOCKS / f"{name}.lock").read_text()
    bill = json.loads((made / f"sbom-{name}.cdx.json").read_text())
    pins = re.findall(r"^([\w.-]+)==(\S+)", lock, re.MULTILINE)
    assert [(one["name"], one["version"]) for one in bill["components"]] == pins
    assert len({one["bom-ref"] for one in bill["components"]}) == len(pins)
    hashes = re.findall(r"sha256:(\w+)", lock)
    wheels = [wheel for one in bill["components"] for wheel in one["externalReferences"]]
    assert [wheel["hashes"][0]["content"] for wheel in wheels] == hashes


def test_the_notes_are_one_page_with_the_newest_summary(made: Path) -> None:
    notes = (made / "NOTES.md").read_text()
    assert len(notes.splitlines()) <= release.NOTES_LINES
    assert release.notes_of((ROOT / "CHANGELOG.md").read_text())[1] in notes
    long = "# C\n\n## 1\n\n" + "a\n" * release.NOTES_LINES + "\n### Added\n"
    with pytest.raises(ValueError, match="shorten the summary"):
        release.notes(long)


def test_what_does_not_fit_together_is_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    assert release.not_releasable(dirty=True) == ""
    monkeypatch.setattr(release, "__version__", "9.9.9")
    assert "they have to be ('9.9.9', '9.9.9')" in release.not_releasable(dirty=True)


def test_a_wheel_has_every_file_that_the_code_reads() -> None:
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    kept: set[Path] = set()
    for package, patterns in described["package-data"].items():
        for pattern in patterns:
            kept.update((ROOT / package.replace(".", "/")).glob(pattern))
    files = [path for room in ("serve_app", "workers") for path in (ROOT / room).rglob("*.*")]
    read = {path for path in files if path.suffix in (".lua", ".toml", ".json", ".yaml")}
    assert read - kept == set()
    assert len(read) > 8
