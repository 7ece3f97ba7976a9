"""Every table that `scripts/bench` prints: a line for each row as it comes, and Markdown."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .stats import Measure, Measured, Ratio, loads_of, median, names_of, select

_LABELS = f"{'':<20}{'load':>10}{'round':>6}"


@dataclass(frozen=True)
class Column:
    """One figure of a row, and how it is written. A row with ``unfinished`` requests has lower
    bounds (≥) where ``least`` is set; ``spread`` adds the lowest and the highest round.
    """

    name: str
    of: Measure
    form: str = ",.0f"
    least: bool = False
    spread: bool = False

    @property
    def width(self) -> int:
        return max(len(self.name), 6) + 2

    def cell(self, rows: Sequence[Any]) -> str:
        """The median of the rounds, or the figure of the only one."""
        values = [self.of(row) for row in rows]
        least = self.least and any(row.unfinished for row in rows)
        text = self._write(median(values), least)
        if not self.spread or len(rows) == 1 or math.isnan(median(values)):
            return text
        return f"{text} ({self._write(min(values), least)}–{self._write(max(values), least)})"

    def _write(self, value: float, least: bool) -> str:
        # A dash for what nobody has measured, such as the memory of an engine in virtual time.
        return "–" if math.isnan(value) else f"{'≥' if least else ''}{value:{self.form}}"


def heading(columns: Sequence[Column]) -> str:
    text = _LABELS + "".join(f"{column.name:>{column.width}}" for column in columns)
    return f"{text}\n{'─' * len(text)}"


def line(columns: Sequence[Column], row: Any) -> str:
    """One row, with what went wrong below it."""
    labels = f"{row.name:<20}{row.load:>10}{row.round:>6}"
    text = labels + "".join(f"{column.cell([row]):>{column.width}}" for column in columns)
    wrong = (f"    {count} × {error}" for error, count in row.error_kinds.items())
    return "\n".join([text, *wrong])


def summary(columns: Sequence[Column], rows: Sequence[Measured]) -> str:
    found = [
        [load, name, *(column.cell(of_name) for column in columns)]
        for load in loads_of(rows)
        for name in names_of(rows)
        if (of_name := select(rows, name, load))
    ]
    return markdown(["load", "", *(column.name for column in columns)], found)


def ratio_table(found: Iterable[Ratio]) -> str:
    """Ratios, with the lowest and the highest round."""
    lines = []
    for one in found:
        low, high = min(one.per_round), max(one.per_round)
        spread = f"{median(one.per_round):.2f} ({low:.2f}–{high:.2f})"
        lines.append([one.load, one.ours, one.theirs, one.measure, spread])
    return markdown(["load", "of", "÷", "figure", "median of the rounds (lowest–highest)"], lines)


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    found = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in found)
