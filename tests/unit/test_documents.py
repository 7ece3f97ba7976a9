"""The documents say what the code does."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from scripts import pages
from serve_app.settings import load_settings
from tests.unit.test_architecture import LAYERS

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 170_000


@pytest.mark.parametrize("name", sorted({document for document, _, _ in pages.TABLES}))
def test_the_tables_of_a_document_are_those_of_the_code(name: str) -> None:
    shown = (pages.DOCS / name).read_text()
    assert shown == pages.page(name), "run: .venv/bin/python -m scripts.pages"


def test_every_config_file_of_the_cluster_folder_has_settings_that_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HERMES_KEYS_FILE", "/etc/hermes/keys")
    files = sorted((ROOT / "cluster").glob("*.yaml"))
    assert files
    for file in files:
        for application in yaml.safe_load(file.read_text())["applications"]:
            load_settings(application["args"])


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links, as GitHub does it."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_relative_link_in_the_documents_leads_somewhere() -> None:
    broken: list[str] = []
    pages = [*ROOT.glob("*.md"), ROOT / "serve_app" / "local" / "locks" / "README.md"]
    for page in [*pages, *sorted((ROOT / "docs").rglob("*.md"))]:
        for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
            there = (page.parent / target) if target else page
            if "://" in target or target.startswith("mailto:"):
                continue
            if not there.exists() or (anchor and anchor not in anchors(there)):
                broken.append(f"{page.relative_to(ROOT)} → {target}#{anchor}")
    assert not broken


def test_a_reader_can_read_the_documents() -> None:
    """What does not help a user is in docs/evidence or docs/adr."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    sizes = {page.name: len(page.read_bytes()) for page in pages}
    assert sum(sizes.values()) <= MOST_BYTES, sizes


def test_the_architecture_shows_the_layers_that_the_tests_enforce() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    shown = text.split("from the top to the bottom:\n\n```\n")[1].split("\n```")[0]
    layers = [[name.removeprefix("serve_app.") for name in names] for names in LAYERS]
    assert [line.split(", ") for line in shown.splitlines()] == layers


def test_the_cluster_launchers_file_is_one_that_ray_takes() -> None:
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    schema = json.loads((folder / "autoscaler" / "ray-schema.json").read_text())
    for file in sorted((ROOT / "cluster" / "launch").glob("*.yaml")):
        jsonschema.validate(yaml.safe_load(file.read_text()), schema)


def test_nodes_on_one_machine_get_ports_of_their_own(tmp_path: Path) -> None:
    """An agent whose port is taken ends, and its raylet with it."""
    ray = tmp_path / "ray"
    ray.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    ray.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "HERMES_STATE": str(tmp_path / "state"),
        "RAY_AUTH_TOKEN": "t",
    }
    chosen: list[int] = []
    for _ in range(2):
        words = [str(ROOT / "cluster" / "ray-start"), "node", "192.0.2.1:6379"]
        told = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        chosen += map(int, re.findall(r"^--\S+-port=(\d+)$", told.stdout, re.MULTILINE))
    assert len(chosen) == len(set(chosen)) == 6
    # Ray's workers have those below, Serve's replicas those from 30000 on, and Linux gives out
    # those from 32768 on.
    assert all(20000 <= port < 30000 for port in chosen)
