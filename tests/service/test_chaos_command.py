"""`scripts/chaos` finds nothing, and finds the damage once fencing is switched off."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from scripts.local.environment import ROOT

pytestmark = pytest.mark.timeout(400)


def chaos(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "chaos", *words], capture_output=True, text=True, timeout=380, check=False
    )


def test_a_minute_of_disorder_loses_duplicates_and_corrupts_nothing(tmp_path: Path) -> None:
    done = chaos("--minutes", "1", "--seed", "7", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lost 0, duplicated 0, corrupted 0" in done.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["sent"] == found["completed"] + sum(found["failed"].values()) > 50
    assert len(found["strikes"]) >= 6


@pytest.mark.parametrize(("words", "status"), [((), 0), (("--without-fencing",), 1)])
def test_only_fencing_keeps_a_worker_that_woke_from_doing_damage(words: tuple[str, ...], status: int) -> None:
    done = chaos("--minutes", "0.5", "--every-s", "6", "--faults", "worker-hang", "--tokens", "1500,1800", *words)
    assert done.returncode == status, done.stdout + done.stderr
    assert ("duplicated 0, corrupted 0" in done.stdout) is (status == 0)


def test_an_unknown_fault_is_refused() -> None:
    done = chaos("--faults", "earthquake")
    assert done.returncode == 2
    assert "no such fault: earthquake" in done.stderr
