"""Runs kubectl and helm. What they refuse becomes one sentence."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

_ANSWER_S = 60.0
"""How long a command may take that does not wait for anything."""


class CommandFailed(Exception):
    """A command of kubectl or helm has failed. `status`: its exit status; None if it hung."""

    def __init__(self, sentence: str, status: int | None = None) -> None:
        super().__init__(sentence)
        self.status = status


class Cluster:
    """One namespace of one cluster, through kubectl and helm.

    Args:
        context: of kubectl's configuration; empty: the current one.
    """

    def __init__(self, context: str, namespace: str) -> None:
        where = ("--namespace", namespace)
        self.kubectl = ("kubectl", *(("--context", context) if context else ()), *where)
        self.helm = ("helm", *(("--kube-context", context) if context else ()), *where)

    def run(self, argv: Sequence[str], stdin: str = "", limit_s: float = _ANSWER_S) -> str:
        """Run a command in a session of its own, so that Ctrl-C does not end it halfway.

        Raises:
            CommandFailed: it is missing, has failed, or has not answered in time.
        """
        if shutil.which(argv[0]) is None:
            raise CommandFailed(f"{argv[0]} is not on PATH: install it, or correct PATH")
        try:
            done = subprocess.run(
                argv,
                input=stdin,
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            raise CommandFailed(f"{_short(argv)}: no answer within {limit_s:.0f} s") from None
        if done.returncode:
            raise CommandFailed(f"{_short(argv)}: {_reason(done)}", done.returncode)
        return done.stdout

    def read(self, argv: Sequence[str]) -> Any:
        """Run a command that prints JSON."""
        return json.loads(self.run(argv))


def _short(argv: Sequence[str]) -> str:
    line = shlex.join(argv)
    return line if len(line) < 120 else f"{line[:117]}..."


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return said[-1] if said else f"it ended with {done.returncode}"
