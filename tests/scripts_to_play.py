"""What tests have the model of tests/scripted_model.py say. Imports no vLLM."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Script:
    """What the model says, and where it stands still until it may go on."""

    text: str
    calls: Sequence[tuple[str, dict[str, Any]]] = ()
    held: Sequence[int] = field(default_factory=tuple)
    """In the middle of these calls the engine makes no step before `let_go`."""

    def write(self, folder: Path) -> str:
        """The prompt that plays it."""
        file = folder / "script.json"
        file.write_text(json.dumps(asdict(self)))
        return f"Play {file}"

    def says(self, turn: int) -> str:
        if turn >= len(self.calls):
            return self.text
        name, arguments = self.calls[turn]
        call = json.dumps({"name": name, "arguments": arguments})
        return f"Step {turn}.\n<tool_call>\n{call}\n</tool_call>"


def holder(folder: Path, turn: int) -> int:
    """The process that stands still in this turn; 0 if none does yet."""
    file = folder / f"held-{turn}"
    return int(file.read_text()) if file.exists() else 0


def let_go(folder: Path, turn: int) -> None:
    (folder / f"go-{turn}").touch()
