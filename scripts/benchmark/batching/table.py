"""The tables that a comparison of batchers prints."""

import math
from collections.abc import Sequence

from ..measurement import Latency
from .row import BatchRow
from .summary import Spread, batchers_of, loads_of, ratios, select, spread

_COLUMNS = (
    f"{'batcher':<20}{'load':>9}{'round':>6}{'req/s':>8}{'tok/s':>8}{'end-to-end ms p50/p99':>24}"
    f"{'interactive':>18}{'batch':>18}{'in flight':>11}{'slots used':>11}{'KV':>7}{'RSS MiB':>9}"
    f"{'cores':>7}{'loop':>7}{'turns/s':>9}{'µs/turn':>8}{'unfinished':>11}{'errors':>7}"
)
_LEGEND = """\
in flight: mean number of requests at the endpoint; slots used: the same per slot of the batcher;
KV: highest use of the KV cache that vLLM reported; RSS, cores: memory and CPU of the server's
processes; loop: CPU share of the event loop on which batcher, connections and users run; turns:
questions to the batcher; ≥: some requests had not ended, and count with the time that they had
waited"""


def heading() -> str:
    """The columns' names and a line."""
    return f"{_COLUMNS}\n{'─' * len(_COLUMNS)}"


def line(row: BatchRow) -> str:
    """One row, with what went wrong below it."""
    least = "≥" if row.unfinished else ""
    text = (
        f"{row.batcher:<20}{row.load:>9}{row.round:>6}{row.requests_per_s:>8.1f}"
        f"{row.tokens_per_s:>8.0f}{_pair(row.end_to_end, least):>24}"
        f"{_pair(row.interactive, least):>18}{_pair(row.batch, least):>18}{row.in_flight:>11.1f}"
        f"{_percent(row.occupancy):>11}{_percent(row.kv_used):>7}{_number(row.rss_mib):>9}"
        f"{_number(row.cores, 2):>7}"
        f"{_percent(row.loop_share):>7}{row.turns_per_s:>9.0f}{_number(row.turn_us, 1):>8}"
        f"{row.unfinished:>11}{row.errors:>7}"
    )
    return "\n".join(
        [text, *(f"    {count} × {error}" for error, count in row.error_kinds.items())]
    )


def summary(rows: Sequence[BatchRow]) -> str:
    """Medians of the rounds as Markdown, with the lowest and the highest round of the throughput;
    then the ratios.
    """
    lines = [
        _LEGEND,
        "",
        "| load | batcher | requests/s | tokens/s (lowest–highest) | p50 ms | p99 ms | "
        "interactive p50 / p99 | in flight | slots used | KV | RSS MiB | cores | tokens/CPU s | "
        "loop | turns/s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        _summary_line(rows, name, load) for load in loads_of(rows) for name in batchers_of(rows)
    ]
    lines += [
        "",
        "| load | of | ÷ | tokens/s (lowest–highest) | tokens/CPU s |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.load} | {one.ours} | {one.theirs} | {_spread(one.spread)} | "
        f"{_spread(one.per_cpu)} |"
        for one in ratios(rows)
    ]
    return "\n".join(lines)


def _summary_line(rows: Sequence[BatchRow], name: str, load: str) -> str:
    found = select(rows, name, load)
    least = "≥ " if any(row.unfinished for row in found) else ""
    tokens = spread(rows, name, load, lambda row: row.tokens_per_s)
    requests = spread(rows, name, load, lambda row: row.requests_per_s).median
    p50 = spread(rows, name, load, lambda row: row.end_to_end.p50_ms).median
    p99 = spread(rows, name, load, lambda row: row.end_to_end.p99_ms).median
    quick50 = spread(rows, name, load, lambda row: row.interactive.p50_ms).median
    quick99 = spread(rows, name, load, lambda row: row.interactive.p99_ms).median
    in_flight = spread(rows, name, load, lambda row: row.in_flight).median
    used = spread(rows, name, load, lambda row: row.occupancy).median
    kv_used = spread(rows, name, load, lambda row: row.kv_used).median
    rss = spread(rows, name, load, lambda row: row.rss_mib).median
    cores = spread(rows, name, load, lambda row: row.cores).median
    per_cpu = spread(rows, name, load, lambda row: row.tokens_per_cpu_s).median
    loop = spread(rows, name, load, lambda row: row.loop_share).median
    turns = spread(rows, name, load, lambda row: row.turns_per_s).median
    return (
        f"| {load} | {name} | {requests:,.1f} | {tokens.median:,.0f} ({tokens.low:,.0f}–"
        f"{tokens.high:,.0f}) | {least}{p50:,.0f} | {least}{p99:,.0f} | {least}{quick50:,.0f} / "
        f"{least}{quick99:,.0f} | {in_flight:.1f} | {_percent(used)} | {_percent(kv_used)} | "
        f"{_number(rss)} | {_number(cores, 2)} | {_number(per_cpu)} | "
        f"{_percent(loop)} | {turns:,.0f} |"
    )


def _spread(found: Spread | None) -> str:
    return "–" if found is None else f"{found.median:.2f} ({found.low:.2f}–{found.high:.2f})"


def _pair(latency: Latency, least: str) -> str:
    return f"{least}{_short(latency.p50_ms)} / {least}{_short(latency.p99_ms)}"


def _short(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _number(value: float, digits: int = 0) -> str:
    """Of what virtual time does not know, a dash."""
    return "–" if math.isnan(value) else f"{value:,.{digits}f}"


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.0%}"
