"""Whatever JSON a client sends to any path: there is no 5xx, no other request waits for it, and no
process dies.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = os.environ.get("HERMES_FUZZ_S", "15")
ROOT = Path(__file__).parents[2]


def send(*words: str) -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.journal.any_json", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout[-2_000:])
    assert done.returncode == 0, (
        f"exit code {done.returncode}\n{done.stdout[-2_000:]}\n{done.stderr[-6_000:]}"
    )
    assert "200:" in done.stdout, "some of it was served"


def test_no_json_gets_a_5xx_or_ends_an_ingress(redis_url: str, namespace: str) -> None:
    send(redis_url, namespace)


@pytest.mark.clock
def test_no_json_holds_the_loop_of_an_ingress(redis_url: str, namespace: str) -> None:
    send(redis_url, namespace, SECONDS)
