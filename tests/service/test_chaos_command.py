"""`scripts/chaos` kills processes at random and finds no damage.

tests/journal/test_chaos_client.py shows the damage that it finds, and docs/performance.md has the
command's own result.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from scripts.local.environment import ROOT

# The chaos command is a tool.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]


def chaos(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "chaos", *words],
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )


def test_half_a_minute_of_disorder_loses_duplicates_and_corrupts_nothing(tmp_path: Path) -> None:
    done = chaos(
        *("--minutes", "0.7", "--every-s", "3.5", "--seed", "7"),
        *("--json", str(tmp_path / "out.json")),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lost 0, duplicated 0, corrupted 0" in done.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["sent"] == found["completed"] + sum(found["failed"].values()) > 20
    assert len({strike["fault"] for strike in found["strikes"]}) >= 5


def test_an_unknown_fault_is_refused() -> None:
    done = chaos("--faults", "earthquake")
    assert done.returncode == 2
    assert "no such fault: earthquake" in done.stderr
