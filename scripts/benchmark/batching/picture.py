"""The picture: throughput and latency of every batcher at every load of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from .row import BatchRow
from .summary import Measure, batchers_of, loads_of, spread

_COLOURS = (
    *("#8D96A5", "#F28E2B", "#EDC948", "#76B7B2", "#59A14F", "#B07AA1", "#9C755F"),
    *("#0F62FE", "#E15759", "#1F2430"),
)
_INK, _QUIET, _FAINT = "#1F2430", "#5B6472", "#E4E7EC"
_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(path: Path, rows: Sequence[BatchRow]) -> None:
    """Write a PNG: bars are medians of the rounds, whiskers the lowest and the highest round."""
    with plt.rc_context(_STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(14, 5.6), dpi=140)
        _bars(left, rows, lambda row: row.tokens_per_s)
        left.set_title("Throughput: tokens per second · higher is better", loc="left")
        _bars(right, rows, lambda row: row.end_to_end.p50_ms)
        right.set_yscale("log")
        right.set_title("End to end, p50 in ms · lower is better", loc="left")
        handles, names = left.get_legend_handles_labels()
        figure.legend(handles, names, loc="upper center", ncol=len(names), frameon=False)
        figure.text(0.02, 0.02, _caption(rows), fontsize=8.5, color=_QUIET)
        figure.tight_layout(rect=(0.01, 0.04, 0.99, 0.94), w_pad=3)
        figure.savefig(path)
        plt.close(figure)


def _bars(axes: Axes, rows: Sequence[BatchRow], measure: Measure) -> None:
    names, loads = batchers_of(rows), loads_of(rows)
    width = 0.84 / len(names)
    for index, name in enumerate(names):
        spreads = [spread(rows, name, load, measure) for load in loads]
        middles = [one.median for one in spreads]
        below = [one.median - one.low for one in spreads]
        above = [one.high - one.median for one in spreads]
        places = [place + (index - (len(names) - 1) / 2) * width for place in range(len(loads))]
        colour = _COLOURS[index % len(_COLOURS)]
        axes.bar(places, middles, width * 0.92, color=colour, label=name, zorder=2)
        whiskers = (below, above)
        axes.errorbar(places, middles, whiskers, fmt="none", ecolor=_INK, elinewidth=1, zorder=3)
    axes.set_xticks(range(len(loads)), loads)
    axes.set_xlabel("load: % of the measured capacity" if "%" in loads[0] else "concurrent users")
    axes.grid(axis="y", color=_FAINT, zorder=0)
    axes.tick_params(which="both", length=0)


def _caption(rows: Sequence[BatchRow]) -> str:
    rounds = max(row.round for row in rows)
    return (
        f"{rounds} rounds in turn, medians; whiskers: lowest and highest round · "
        f"{sum(row.errors for row in rows)} errors · where requests had not ended, p50 is a lower "
        "bound"
    )
