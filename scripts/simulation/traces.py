"""A public trace as work. It lies in `$HERMES_DATA/traces` and is never copied into the project."""

import csv
import os
import random
from datetime import datetime
from pathlib import Path

from serve_app.errors import SettingsError

from .work import Work

_ROOT = Path(__file__).resolve().parents[2]


def trace_file(name: str) -> Path:
    """Where a trace lies.

    Raises:
        SettingsError: it is not there.
    """
    folder = Path(os.environ.get("HERMES_DATA", _ROOT / ".hermes" / "data"))
    path = folder / "traces" / name
    if not path.exists():
        raise SettingsError(f"{path} is absent: scripts/fetch-data brings it (or set HERMES_DATA)")
    return path


def azure(seed: int, count: int, most_tokens: int) -> list[tuple[float, Work]]:
    """Arrivals and lengths of so many requests in a row of Azure's conversation trace of 2023, from
    a place that the seed chooses. Those with more than `most_tokens` are left out.

    Raises:
        SettingsError: the trace is not there.
    """
    timed = []
    with trace_file("azure2023_conv.csv").open() as file:
        for row in csv.DictReader(file):
            # Seven digits, of which Python reads six.
            at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            if prompt + output <= most_tokens:
                timed.append((at_s, Work(max(1, prompt), max(1, output))))
    first = random.Random(f"{seed}/azure").randrange(max(1, len(timed) - count))
    part = timed[first : first + count]
    return [(at_s - part[0][0], work) for at_s, work in part]
