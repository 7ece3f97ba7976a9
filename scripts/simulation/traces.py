"""Public traces as work. They lie in `$HERMES_DATA/traces` and are never copied into the project.

No trace has classes, and most have no tenants: both are drawn by a seed (`Cast`).
"""

import csv
import json
import os
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from serve_app.errors import SettingsError

from .work import Work
from .workloads import Lengths, bursts

_ROOT = Path(__file__).resolve().parents[2]
_TICK_S = 3.0
"""Mooncake's times are multiples of this."""
_CODING_BLOCK = 64
_TEXT = 1 << 32
"""Distance between the identities of the texts of two sessions."""


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
        """Tenant and class of a session or request; always the same ones."""
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


def mooncake(
    cast: Cast, file_name: str, trace_block: int, block_size: int
) -> Iterator[tuple[float, Work]]:
    """Mooncake's conversation trace: its blocks say which beginnings are the same."""
    rng = random.Random(f"{cast.seed}/mooncake")
    rows: list[tuple[float, dict[str, Any]]] = []
    for line in trace_file(file_name).read_text().splitlines():
        row = json.loads(line)
        rows.append((row["timestamp"] / 1000 + rng.random() * _TICK_S, row))
    rows.sort(key=lambda one: one[0])
    ratio = trace_block // block_size
    for number, (at_s, row) in enumerate(rows):
        session = row.get("session", "")
        tenant, name = cast.draw(session or number)
        full = row["input_length"] // block_size
        prefix = (name_of * ratio + part for name_of in row["hash_ids"] for part in range(ratio))
        work = Work(
            max(1, row["input_length"]),
            max(1, row["output_length"]),
            tenant=tenant,
            session=session,
            request_class=name,
            prefix=tuple(islice(prefix, full)),
        )
        yield at_s, work


@dataclass(frozen=True)
class Turn:
    """A request of a session, and the time that passes between the answer before it and it."""

    work: Work
    think_s: float


def coding_agent(cast: Cast, block_size: int) -> Iterator[Sequence[Turn]]:
    """Sessions of coding agents; a subagent is a session of its own."""
    number = 0
    with trace_file("weka_dev_compact.jsonl").open() as file:
        for line in file:
            session = json.loads(line)
            agents = [row for row in session["requests"] if row["type"] == "subagent"]
            for requests in (session["requests"], *(row["requests"] for row in agents)):
                number += 1
                yield _turns(cast, f"{session['id']}-{number}", number, requests, block_size)


def _turns(
    cast: Cast, session: str, number: int, requests: Sequence[dict[str, Any]], block_size: int
) -> list[Turn]:
    tenant, name = cast.draw(session)
    ratio = max(1, _CODING_BLOCK // block_size)
    found: list[Turn] = []
    for row in requests:
        if row["type"] == "subagent":
            continue
        ids = (
            number * _TEXT + block * ratio + part
            for first, last in row["hash_ranges"]
            for block in range(first, last + 1)
            for part in range(ratio)
        )
        work = Work(
            max(1, row["in"]),
            max(1, row["out"]),
            tenant=tenant,
            session=session,
            request_class=name,
            prefix=tuple(islice(ids, row["in"] // block_size)),
        )
        found.append(Turn(work, row.get("think_time") or 0.0))
    return found


def servegen(
    cast: Cast, model: str, begin_s: float, duration_s: float, rate_per_s: float
) -> Iterator[tuple[float, Work]]:
    """Uneven clients as tenants: their rates and burstiness are ServeGen's, scaled to `rate_per_s`
    together; their lengths, which are not in the file, are drawn for each client.
    """
    chosen = list(_windows(model, begin_s, duration_s))
    total = sum(window.rate_per_s * window.length_s for window in chosen) / duration_s
    if not total:
        raise SettingsError(f"servegen_client_rates.csv has nothing of {model} at {begin_s:.0f} s")
    found: list[tuple[float, Work]] = []
    for window in chosen:
        rng = random.Random(f"{cast.seed}/{window.client}")
        prompt, output = (
            Lengths(rng.lognormvariate(5.3, 0.7)),
            Lengths(rng.lognormvariate(4.6, 0.7)),
        )
        _, name = cast.draw(window.client)
        seed = f"{cast.seed}/{window.client}/{window.at_s}"
        drawn = random.Random(f"{seed}/lengths")
        scaled = window.rate_per_s * rate_per_s / total
        for at_s in bursts(scaled, max(window.cv, 0.1), window.length_s, seed, window.at_s):
            work = Work(
                prompt.draw(drawn),
                output.draw(drawn),
                tenant=f"client-{window.client}",
                request_class=name,
            )
            found.append((at_s, work))
    yield from sorted(found, key=lambda one: one[0])


@dataclass(frozen=True)
class _Window:
    client: str
    at_s: float
    """From the beginning of what was chosen."""
    length_s: float
    rate_per_s: float
    cv: float


_WINDOW_S = 600.0


def _windows(model: str, begin_s: float, duration_s: float) -> Iterator[_Window]:
    with trace_file("servegen_client_rates.csv").open() as file:
        for row in csv.DictReader(file):
            at_s = float(row["window_start_s"]) - begin_s
            rate_per_s = float(row["rate_rps"])
            if row["model"] == model and 0 <= at_s < duration_s and rate_per_s:
                length_s = min(_WINDOW_S, duration_s - at_s)
                yield _Window(row["client"], at_s, length_s, rate_per_s, float(row["cv"]))


Reader = Callable[[Cast, int], Iterator[tuple[float, Work]]]
TIMED: dict[str, Reader] = {
    "azure": lambda cast, _: azure(cast),
    "mooncake": lambda cast, block: mooncake(
        cast, "mooncake_conversation_sessions.jsonl", 512, block
    ),
    "mooncake-div16": lambda cast, block: mooncake(
        cast, "mooncake_conversation_div16.jsonl", 32, block
    ),
}
"""Traces with times of arrival."""
