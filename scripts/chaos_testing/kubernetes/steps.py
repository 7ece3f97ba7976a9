"""What a fault consists of: commands, waits, and the choice of a victim. Pure."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import yaml

Manifest = dict[str, Any]


class Until(StrEnum):
    """What a run waits for, in the words of `--dry-run`."""

    ASKED = "the client has asked for every text"
    FLOWING = "every stream flows"
    ENDED = "every stream has ended"
    WHOLE = "the service is whole: one Ray cluster, every pod ready, every replica in /readyz"
    SWITCHED = "another Ray cluster serves"
    GROWN = "/readyz counts as many engines as the load needs"
    SHRUNK = "only the least number of engine pods is left"


class Victim(StrEnum):
    """What `Choose` looks for, in the words of `--dry-run`."""

    POD = "POD: one of them that is ready, of the cluster that serves"
    DRAINED = (
        "NODE: one of theirs, without the client (and without Redis and head, if there is one)"
    )
    CUT = "NODE: one of theirs, without the client, Redis and the head; POD: an engine pod there"


@dataclass(frozen=True)
class Choose:
    """Look for a victim among the pods of a component: sets `$POD` and `$NODE`."""

    victim: Victim
    component: str


@dataclass(frozen=True)
class Command:
    """A command. `$POD` and `$NODE` in it stand for the victim.

    `stdin`: a manifest; `ends`: exit statuses besides 0 that mean success; `cannot`: those that
    mean that the fault is not possible here.
    """

    argv: tuple[str, ...]
    stdin: Manifest | None = None
    limit_s: float = 60.0
    ends: tuple[int, ...] = ()
    cannot: tuple[int, ...] = ()

    def at(self, victim: dict[str, str]) -> tuple[str, ...]:
        """The command line for a victim."""
        return tuple(_filled(word, victim) for word in self.argv)

    @property
    def input(self) -> str:
        """What the command reads."""
        return "" if self.stdin is None else json.dumps(self.stdin)

    def text(self) -> str:
        """As a line of a shell script."""
        line = " ".join(_quoted(word) for word in self.argv)
        if self.stdin is None:
            return line
        return f"{line} <<'END'\n{yaml.safe_dump(_short(self.stdin), sort_keys=False)}END"


@dataclass(frozen=True)
class Wait:
    """Wait for a condition, for so long at most."""

    until: Until
    limit_s: float


@dataclass(frozen=True)
class Hold:
    """Leave a fault in place for so long."""

    seconds: float


VARIABLES = ("POD", "NODE")
Step = Command | Wait | Hold


@dataclass(frozen=True)
class Fault:
    """One line of the table.

    `name`: for `--faults`; `what`: for the table; `undo`: runs after `steps`, however they end;
    `then`: what is waited for afterwards.
    """

    name: str
    what: str
    choose: Choose | None
    steps: tuple[Step, ...]
    undo: tuple[Command, ...]
    then: tuple[Wait, ...]


def _filled(word: str, victim: dict[str, str]) -> str:
    for name, value in victim.items():
        word = word.replace(f"${name}", value)
    return word


def _quoted(word: str) -> str:
    open_ended = any(f"${name}" in word for name in VARIABLES) and "\n" not in word
    return f'"{word}"' if open_ended else shlex.quote(word)


def _short(manifest: Manifest) -> Manifest:
    """Without the text of files, which can be read in this checkout."""
    if manifest["kind"] != "ConfigMap":
        return manifest
    return {**manifest, "data": dict.fromkeys(manifest["data"], "(the file)")}
