"""The table that a simulation prints."""

import math

from rich.console import Console
from rich.table import Table

from .figures import Figures, Group

_COLUMNS = (
    "",
    "requests",
    "answered",
    "tokens",
    "share",
    "wait s",
    "TTFT s",
    "token ms",
    "whole s",
)


def show(console: Console, found: Figures, title: str) -> None:
    """Print the figures of one simulation."""
    table = Table(
        title=title, title_justify="left", caption=_caption(found), caption_justify="left"
    )
    judged = any(not math.isnan(group.good) for group in found.groups)
    for column in _COLUMNS + (("in SLO",) if judged else ()):
        table.add_column(column, justify="right" if column else "left")
    for place, group in enumerate(found.groups):
        cells = _cells(group)
        if judged:
            cells.append("-" if math.isnan(group.good) else f"{group.good:.1%}")
        table.add_row(*cells, end_section=place == 0)
    console.print(table)


def _cells(group: Group) -> list[str]:
    return [
        group.name,
        f"{group.requests:,}",
        f"{group.answered:,}",
        f"{group.tokens:,}",
        f"{group.share:.1%}",
        _pair(group.wait_p50_s, group.wait_p99_s),
        _pair(group.ttft_p50_s, group.ttft_p99_s),
        _pair(group.per_token_p50_ms, group.per_token_p99_ms),
        _pair(group.whole_p50_s, group.whole_p99_s),
    ]


def _pair(middle: float, tail: float) -> str:
    """p50 / p99."""
    return f"{_short(middle)} / {_short(tail)}"


def _short(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _caption(found: Figures) -> str:
    queries = found.engine["vllm:prefix_cache_queries_total"] or 1.0
    everyone = found.groups[0]
    parts = [
        "times are p50 / p99",
        f"{found.simulated_s:,.1f} s simulated in {found.wall_s:.1f} s",
        f"{found.tokens_per_s:,.0f} tokens/s",
        f"slots used {found.slots_used:.1%}",
        f"free slots while requests waited {found.idle_slot_s:.2f} slot s",
        f"KV used at most {found.kv_used_max:.1%}",
        f"preemptions {found.engine['vllm:num_preemptions_total']:,.0f}",
        f"prefix cache {found.engine['vllm:prefix_cache_hits_total'] / queries:.1%}",
        f"claims {found.claims:,}",
    ]
    for count, what in (
        (everyone.refused, "too long for the engine"),
        (everyone.expired, "past their deadline"),
        (everyone.open, "still open at the end"),
    ):
        if count:
            parts.append(f"{count:,} requests {what}")
    return " · ".join(parts)
