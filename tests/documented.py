"""What README.md, docs/install.md and docs/agents.md have a reader type or write into files."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README, INSTALL, AGENTS = (
    ROOT / name for name in ("README.md", "docs/install.md", "docs/agents.md")
)
_INLINE = r"`((?:scripts/|(?:hermes-serve|helm|pip) )[^`]+)`"


def blocks(page: Path, language: str = "bash") -> list[str]:
    """The text of each fenced block of a language."""
    return blocks_of(page.read_text(), language)


def blocks_of(text: str, language: str = "bash") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def section(page: Path, heading: str) -> str:
    """What stands below a heading of the second level."""
    (found,) = re.findall(
        rf"^## {heading}\n(.*?)(?=^## |\Z)", page.read_text(), re.DOTALL | re.MULTILINE
    )
    return str(found)


def files(text: str) -> list[tuple[str, str]]:
    """Files in the reader's home, named in the line before their block: path and text."""
    return re.findall(r"`~/(\S+)`:\n\n```\w+\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


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
