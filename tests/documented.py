"""The commands that README.md and docs/install.md tell a reader to type."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README, INSTALL = ROOT / "README.md", ROOT / "docs" / "install.md"
_INLINE = r"`((?:scripts/|(?:hermes-serve|helm|pip) )[^`]+)`"


def blocks(page: Path, language: str = "bash") -> list[str]:
    """The text of each fenced block of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def lines(page: Path) -> list[str]:
    """Each line of the shell blocks, without its comment. A command that goes on in the next line
    is one line.
    """
    found = "".join(blocks(page)).replace("\\\n", "").splitlines()
    return [line for line in (re.sub(r"(^|\s+)#\s.*", "", line) for line in found) if line]


def line(page: Path, beginning: str) -> str:
    """The one line that begins so."""
    (found,) = [line for line in lines(page) if line.startswith(beginning)]
    return found


def spans(page: Path) -> list[str]:
    """The commands in the text and in the tables."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(_INLINE, prose)
