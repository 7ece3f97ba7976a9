"""The picture: throughput and a latency against load, for everything that a run compared."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from .stats import Measure, Measured, loads_of, names_of, spread

# The first system stands out; peers stay apart from each other and from it for colour-blind readers
# too.
COLOURS = (
    *("#0F62FE", "#8D96A5", "#F28E2B", "#76B7B2"),
    *("#59A14F", "#B07AA1", "#9C755F", "#E15759", "#EDC948"),
)
INK, QUIET, FAINT = "#1F2430", "#5B6472", "#E4E7EC"
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#B8BEC9",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": QUIET,
}

LEGEND: Any = {"frameon": False, "borderpad": 0, "borderaxespad": 0.4, "handlelength": 1.4}


def draw(path: Path, rows: Sequence[Measured], latency: str, p50_ms: Measure) -> None:
    """Write a PNG of the throughput and a latency: bars are medians of the rounds, whiskers the
    lowest and the highest round.
    """
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(14, 5.6), dpi=140)
        _bars(left, rows, lambda row: row.tokens_per_s)
        title(left, "Throughput", "tokens per second · higher is better")
        _bars(right, rows, p50_ms)
        title(right, latency, "p50 in ms · lower is better")
        right.set_yscale("log")
        handles, names = left.get_legend_handles_labels()
        figure.legend(handles, names, loc="upper center", ncol=len(names), **LEGEND)
        rounds = max(row.round for row in rows)
        caption = (
            f"{rounds} rounds in turn, medians; whiskers: lowest and highest round · where "
            "requests had not ended, p50 is a lower bound"
        )
        figure.text(0.02, 0.02, caption, fontsize=8.5, color=QUIET)
        figure.tight_layout(rect=(0.01, 0.04, 0.99, 0.94), w_pad=3)
        figure.savefig(path)
        plt.close(figure)


def _bars(axes: Axes, rows: Sequence[Measured], measure: Measure) -> None:
    names, loads = names_of(rows), loads_of(rows)
    width = 0.84 / len(names)
    for index, name in enumerate(names):
        spreads = [spread(rows, name, load, measure) for load in loads]
        middles = [one.median for one in spreads]
        whiskers = (
            [one.median - one.low for one in spreads],
            [one.high - one.median for one in spreads],
        )
        places = [place + (index - (len(names) - 1) / 2) * width for place in range(len(loads))]
        colour = COLOURS[index % len(COLOURS)]
        axes.bar(places, middles, width * 0.92, color=colour, label=name, zorder=2)
        axes.errorbar(places, middles, whiskers, fmt="none", ecolor=INK, elinewidth=1, zorder=3)
    axes.set_xticks(range(len(loads)), loads)
    axes.set_xlabel("load: concurrent users, arrivals per second or % of the measured capacity")
    axes.grid(axis="y", color=FAINT, zorder=0)
    axes.tick_params(which="both", length=0)


def title(axes: Axes, text: str, subtitle: str) -> None:
    """A heading and a quieter line, flush left above the axes."""
    above: dict[str, Any] = {
        "xycoords": "axes fraction",
        "textcoords": "offset points",
        "ha": "left",
    }
    axes.annotate(text, (0, 1), (0, 28), fontsize=13, weight="bold", **above)
    axes.annotate(subtitle, (0, 1), (0, 12), fontsize=9.5, color=QUIET, **above)
