"""The commands of docs/kubernetes.md render, and make the Secrets that pods ask for."""

from __future__ import annotations

import itertools
import re
import shlex
from typing import Any

import pytest
import yaml

from tests.chart.charts import (
    HA,
    NAMED,
    ROOT,
    SECRETS,
    Document,
    documents,
    merged,
)
from tests.chart.test_references import found
from tests.tables import each

pytestmark = pytest.mark.nightly  # it concerns a document

PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [
    shlex.split(line) for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()
]
INSTALLS = [
    words
    for words in COMMANDS
    if words[:2] == ["helm", "install"] and words[3] == "helm/hermes-serve"
]


def values_of(words: list[str]) -> Document:
    """The values that Helm would take from a command line."""
    values: Document = {}
    for flag, word in itertools.pairwise(words):
        if flag == "-f":
            values = merged(values, yaml.safe_load((ROOT / word).read_text()))
        if flag == "--set":
            key, text = word.split("=", 1)
            value: Any = yaml.safe_load(text)
            for part in reversed(key.split(".")):
                value = {part: value}
            values = merged(values, value)
    return values


@each("words", INSTALLS)
def test_every_installation_that_it_shows_renders(words: list[str]) -> None:
    assert len(INSTALLS) == 3
    assert any(
        item["kind"] == "RayService" for item in documents(merged(SECRETS, values_of(words)))
    )


def test_the_secrets_that_it_makes_have_every_key_that_pods_ask_for() -> None:
    made = {
        words[4]: set(re.findall(r"--from-(?:literal|file)=([\w.-]+)", " ".join(words)))
        for words in COMMANDS
        if words[:4] == ["kubectl", "create", "secret", "generic"]
    }
    asked = [*found(documents(NAMED), "secretKeyRef")]
    asked += found(documents(merged(NAMED, HA)), "secretKeyRef")
    assert asked
    asked += [{"name": "hermes-keys", "key": key} for key in ("keys", "metrics-key")]
    for entry in asked:
        assert entry["key"] in made[entry["name"]]
