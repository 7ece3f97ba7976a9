"""An attacker of a service that requires API keys."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from scripts.local.environment import ROOT
from tests.service.support import Running

HELLO = [{"role": "user", "content": "Who may ask?"}]
BODY: dict[str, Any] = {"model": "hermes-tiny", "messages": HELLO, "max_tokens": 20}


def hostile(service: Running, phase: str) -> subprocess.Popen[str]:
    """Another process, so that its own work is not taken for the service's; nicer, for the cores
    are shared.
    """
    command = [
        sys.executable,
        "-m",
        "tests.service.hostility",
        service.url,
        service.keys["acme"],
        BODY["model"],
        phase,
    ]
    return subprocess.Popen(
        ["nice", "-n", "10", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def told(process: subprocess.Popen[str]) -> dict[str, dict[str, int]]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"it ended with {process.wait(60)}"
    answers: dict[str, dict[str, int]] = json.loads(line)
    print(json.dumps(answers, indent=1))
    return answers
