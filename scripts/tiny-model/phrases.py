"""Reading the hand-written texts in `text/`."""

import re
from pathlib import Path

TEXT = Path(__file__).parent / "text"


def sections(name: str, mark: str) -> dict[str, str]:
    """The parts of a text file that begin with a line `<mark><title>`."""
    parts = re.split(rf"^{mark} ?(.+)\n", (TEXT / name).read_text(), flags=re.MULTILINE)
    return {
        title.strip(): body.strip() for title, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def lines(name: str, mark: str) -> dict[str, list[str]]:
    """The same, each part cut into its lines."""
    return {title: body.splitlines() for title, body in sections(name, mark).items()}


PHRASES = lines("phrases.txt", "@")
