"""`scripts/bench` keeps the key to itself."""

import json
import math
from pathlib import Path

import pytest

from scripts.benchmark.options import parse
from scripts.benchmark.report import write_document
from tests.tables import each

pytestmark = pytest.mark.nightly  # a tool


@each("given", [["--api-key", "sk-secret"], ["--api-key=sk-secret"]])
def test_the_key_does_not_come_into_the_report(given: list[str], tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    words = ["--url", "http://h/v1", *given, "--json", str(file)]
    write_document(parse(words), ["scripts/bench", *words], rows=[math.nan])
    assert "secret" not in file.read_text()
    found = json.loads(file.read_text())
    assert (found["command"][:3], found["rows"]) == (["scripts/bench", *words[:2]], [None])
