"""A public trace as work. It lies in `$HERMES_DATA/traces` and is never copied into the project. It
has no classes and no tenants: both are drawn by a seed (`Cast`).
"""

import csv
import os
import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
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


@dataclass(frozen=True)
class Cast:
    """Who sends a request: tenants of decreasing size, and classes by weight."""

    seed: int
    tenants: int = 4
    classes: tuple[tuple[str, float], ...] = (("realtime", 2), ("standard", 6), ("batch", 2))

    def draw(self, who: object) -> tuple[str, str]:
        """Tenant and class of a request; always the same ones."""
        rng = random.Random(f"{self.seed}/{who}")
        sums = list(accumulate(1 / (place + 1) for place in range(self.tenants)))
        tenant = bisect_right(sums, rng.random() * sums[-1])
        names, weights = zip(*self.classes, strict=True)
        return f"tenant-{tenant}", rng.choices(names, weights)[0]


def azure(cast: Cast) -> Iterator[tuple[float, Work]]:
    """Azure's conversation trace of 2023: arrivals and lengths."""
    with trace_file("azure2023_conv.csv").open() as file:
        began_s: float | None = None
        for number, row in enumerate(csv.DictReader(file)):
            # Seven digits, of which Python reads six.
            at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            began_s = at_s if began_s is None else began_s
            tenant, name = cast.draw(number)
            work = Work(
                max(1, int(row["ContextTokens"])),
                max(1, int(row["GeneratedTokens"])),
                tenant=tenant,
                request_class=name,
            )
            yield at_s - began_s, work


def azure_part(seed: int, count: int, most_tokens: int) -> list[tuple[float, Work]]:
    """So many requests in a row, from a place that the seed chooses; all of one tenant and class.
    Those with more than `most_tokens` are left out.
    """
    nobody = Cast(seed, tenants=1, classes=(("standard", 1),))
    timed = [
        (at_s, work)
        for at_s, work in azure(nobody)
        if work.prompt_tokens + work.output_tokens <= most_tokens
    ]
    first = random.Random(f"{seed}/azure").randrange(max(1, len(timed) - count))
    part = timed[first : first + count]
    return [(at_s - part[0][0], work) for at_s, work in part]
