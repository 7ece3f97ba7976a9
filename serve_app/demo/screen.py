"""What the demo shows: the text of each answer with the seams in it, and a line for each fault."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

_WIDTH, _HEIGHT, _FRAMES_PER_S = 100, 30, 4
_SEAM = "bold white on red"


class Recording:
    """A terminal whose output goes to standard output, and with its times into an asciicast."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._began_s = out, time.monotonic()
        self._frames: list[tuple[float, str]] = []

    def begin(self) -> None:
        """Forget what was written before."""
        self._frames, self._began_s = [], time.monotonic()

    def write(self, text: str) -> int:
        if not self._frames or self._frames[-1][1] != text:  # a picture that has not changed
            self._frames.append((round(time.monotonic() - self._began_s, 3), text))
        return self._out.write(text)

    def flush(self) -> None:
        self._out.flush()

    def isatty(self) -> bool:
        return True

    def save(self, file: Path, title: str) -> None:
        header = {
            "version": 2,
            "width": _WIDTH,
            "height": _HEIGHT,
            "title": title,
            "idle_time_limit": 2,
        }
        # A terminal makes these of line ends.
        frames = [(at_s, "o", text.replace("\n", "\r\n")) for at_s, text in self._frames]
        lines = [header, *frames]
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


class Pane:
    """The text of one answer in lines of one length, so that none changes once it is full."""

    def __init__(self, title: str, width: int) -> None:
        self.title, self._width = title, width - 4
        self._lines = [Text()]

    def add(self, text: str, style: str = "") -> None:
        while text:
            room = self._width - len(self._lines[-1])
            self._lines[-1].append(text[:room], style)
            if text := text[room:]:
                self._lines.append(Text())

    def mark(self, words: str) -> None:
        """A seam in the text."""
        self.add(f" {words} ", _SEAM)

    def render(self, lines: int) -> Panel:
        shown = Text("\n").join(self._lines[-lines:])
        return Panel(shown, title=self.title, title_align="left", height=lines + 2)


class Screen:
    """Panes side by side, and below them a line for each fault.

    Use it in a `with`; on what is no terminal only its last state is printed.
    """

    def __init__(self, record: bool = False) -> None:
        self.recording = Recording(sys.stdout) if record else None
        out: Any = self.recording
        self.console = (
            Console(file=out, width=_WIDTH, height=_HEIGHT, force_terminal=True, highlight=False)
            if record
            else Console(highlight=False)
        )
        self.panes: list[Pane] = []
        self._faults: list[tuple[str, str, str]] = []
        self._findings: list[tuple[str, bool]] = []
        self._live = Live(console=self.console, get_renderable=self._render, auto_refresh=True)
        self._live.refresh_per_second = _FRAMES_PER_S

    def __enter__(self) -> Screen:
        if self.recording:
            self.recording.begin()
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def tell(self, line: str) -> None:
        self.console.print(f"  {line}", markup=False)

    def pane(self, title: str, of: int) -> Pane:
        """A further pane of so many."""
        self.panes.append(Pane(title, self.console.width // of))
        return self.panes[-1]

    def fault(self, at_s: float, words: str) -> None:
        self._faults.append((f"{at_s:5.1f} s", words, "…"))

    def went_on(self, after: str) -> None:
        """What followed the newest fault."""
        at, words, _ = self._faults[-1]
        self._faults[-1] = (at, words, after)

    def finding(self, words: str, kept: bool) -> None:
        """A promise, and whether it was kept."""
        self._findings.append((words, kept))

    def _render(self) -> RenderableType:
        lines = max(5, min(_HEIGHT, self.console.height) - 15)
        texts = Table.grid(expand=True)
        texts.add_row(*(pane.render(lines) for pane in self.panes))
        below = [
            Text.assemble((f"{at}  ", "dim"), (f"{words}  ", "bold"), (after, "green"))
            for at, words, after in self._faults
        ]
        for words, kept in self._findings:
            sign = ("      ✓  ", "bold green") if kept else ("      ✗  ", "bold red")
            below.append(Text.assemble(sign, words))
        return Group(texts, *below)
