"""The picture: throughput and time to first token against load, for every system of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from .comparison import Measure, loads_of, middle, ratios, select, systems_of
from .measurement import Row

# The first system stands out; peers stay apart from each other and from it for colour-blind readers
# too.
COLOURS = ("#0F62FE", "#8D96A5", "#F28E2B", "#76B7B2")
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


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Write a PNG: bars and points are medians of the rounds, whiskers the lowest and highest
    round.
    """
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.6), dpi=160)
        _throughput(left, rows)
        _first_token(right, rows)
        figure.tight_layout(rect=(0.02, 0.05, 0.99, 0.93), w_pad=4)
        edge = left.get_position().x0
        figure.text(edge, 0.02, _caption(rows), fontsize=8.5, color=QUIET)
        handles, names = left.get_legend_handles_labels()
        figure.legend(
            handles,
            names,
            loc="upper left",
            bbox_to_anchor=(edge, 0.995),
            ncol=len(names),
            **LEGEND,
        )
        figure.savefig(path)
        plt.close(figure)


def _throughput(axes: Axes, rows: Sequence[Row]) -> None:
    systems, loads = systems_of(rows), loads_of(rows)
    width = 0.8 / len(systems)
    highest = max(row.tokens_per_s for row in rows)
    for index, system in enumerate(systems):
        heights, whiskers = _spread(rows, system, loads, lambda row: row.tokens_per_s)
        places = [place + (index - (len(systems) - 1) / 2) * width for place in range(len(loads))]
        axes.bar(
            places,
            heights,
            width * 0.92,
            color=COLOURS[index % len(COLOURS)],
            label=system,
            zorder=2,
        )
        if any(low or high for low, high in zip(*whiskers, strict=True)):
            axes.errorbar(
                places,
                heights,
                whiskers,
                fmt="none",
                ecolor=INK,
                elinewidth=1,
                capsize=2,
                zorder=3,
            )
        for place, height, above in zip(places, heights, whiskers[1], strict=True):
            axes.text(
                place,
                height + above + highest * 0.012,
                f"{height:,.0f}",
                ha="center",
                va="bottom",
                fontsize=7.5,
            )
    for place, load in enumerate(loads):
        tallest = max((row.tokens_per_s for row in rows if row.load == load), default=0.0)
        _annotate(axes, rows, load, "tokens/s", place, tallest + highest * 0.075)
    title(axes, "Throughput", "tokens per second · higher is better")
    axes.set_ylim(0, highest * (1.12 + 0.06 * len(systems)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _finish(axes, rows, loads)


def _first_token(axes: Axes, rows: Sequence[Row]) -> None:
    systems, loads = systems_of(rows), loads_of(rows)
    axes.set_yscale("log")
    for index, system in enumerate(systems):
        colour = COLOURS[index % len(COLOURS)]
        middles, _ = _spread(rows, system, loads, lambda row: row.ttft.p50_ms)
        tails, _ = _spread(rows, system, loads, lambda row: row.ttft.p99_ms)
        style: dict[str, Any] = {"color": colour, "zorder": 4 - index / 10, "clip_on": False}
        axes.plot(range(len(loads)), middles, marker="o", markersize=7, linewidth=2.2, **style)
        axes.plot(
            range(len(loads)),
            tails,
            marker="o",
            markersize=4,
            linewidth=1,
            linestyle=(0, (2, 2)),
            **style,
        )
    for place, load in enumerate(loads):
        middles = [
            middle(select(rows, system, load), lambda row: row.ttft.p50_ms) for system in systems
        ]
        _annotate(axes, rows, load, "TTFT p50", place, min(middles) / 1.22, upwards=False)
    title(axes, "Time to first token", "milliseconds · lower is better · thick: p50, dotted: p99")
    low, high = axes.get_ylim()
    axes.set_ylim(low / 1.5 ** len(systems), high)
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    )
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(-0.35, len(loads) - 0.65)
    _finish(axes, rows, loads)


def title(axes: Axes, text: str, subtitle: str) -> None:
    """A heading and a quieter line, flush left above the axes."""
    above: dict[str, Any] = {
        "xycoords": "axes fraction",
        "textcoords": "offset points",
        "ha": "left",
    }
    axes.annotate(text, (0, 1), (0, 28), fontsize=13, weight="bold", **above)
    axes.annotate(subtitle, (0, 1), (0, 12), fontsize=9.5, color=QUIET, **above)


def _annotate(
    axes: Axes,
    rows: Sequence[Row],
    load: str,
    measure: str,
    place: float,
    height: float,
    *,
    upwards: bool = True,
) -> None:
    """The first system's ratio to each peer, in the peer's colour, stacked away from ``height``."""
    found = [ratio for ratio in ratios(rows) if (ratio.measure, ratio.load) == (measure, load)]
    for line, ratio in enumerate(reversed(found)):
        colour = COLOURS[(len(found) - line) % len(COLOURS)]
        text = f"{ratio.median:.2f}×" if ratio.median < 10 else f"{ratio.median:.0f}×"
        offset = (0, 12 * line if upwards else -12 * (len(found) - line))
        axes.annotate(
            text,
            (place, height),
            offset,
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=colour,
            weight="bold",
        )


def _spread(
    rows: Sequence[Row], system: str, loads: Sequence[str], measure: Measure
) -> tuple[list[float], tuple[list[float], list[float]]]:
    """Medians over the rounds, and how far the lowest and highest rounds are from them."""
    middles = [middle(select(rows, system, load), measure) for load in loads]
    values = [[measure(row) for row in select(rows, system, load)] for load in loads]
    below = [max(0.0, mid - min(found)) for mid, found in zip(middles, values, strict=True)]
    above = [max(0.0, max(found) - mid) for mid, found in zip(middles, values, strict=True)]
    return middles, (below, above)


def _finish(axes: Axes, rows: Sequence[Row], loads: Sequence[str]) -> None:
    axes.set_xticks(range(len(loads)), loads)
    axes.set_xlabel("concurrent requests" if rows[0].concurrency else "arrivals per second")
    axes.grid(axis="y", color=FAINT, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0)


def _caption(rows: Sequence[Row]) -> str:
    systems, rounds = systems_of(rows), max(row.round for row in rows)
    turns = (
        f"{rounds} rounds in turn, medians; whiskers: lowest and highest round"
        if rounds > 1
        else "one round"
    )
    text = (
        f"{turns} · {rows[0].max_tokens} tokens a response · {sum(row.errors for row in rows)} "
        "errors"
    )
    return (
        text
        if len(systems) == 1
        else f"{text} · n×: {systems[0]} ÷ the peer of that colour, median of the rounds"
    )
