"""`scripts/demo` as a user runs it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


def test_the_demo_keeps_its_promises(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    command = [str(ROOT / "scripts" / "demo"), "--json", str(told)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(told.read_text())
    assert [fault["what"].split("  ")[0] for fault in found["faults"]] == [
        "kill -9",
        "kill -9",
        "kill -9",
        "serve deploy",
    ]
    assert all(found["findings"].values())
