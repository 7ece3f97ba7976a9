"""The picture: waits by class and by tenant, slots used and KV used, over time."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from scripts.benchmark.plot import COLOURS, FAINT, LEGEND, STYLE, title
from scripts.benchmark.stats import percentile
from serve_app.policy.classes import CLASSES

from .figures import waiting_and_running
from .service import Outcome
from .work import Record

_BINS = 60
_TENANTS = 4


def draw(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Write a PNG: a column for each simulation, a row for each measure."""
    with plt.rc_context(STYLE):
        size = (7.5 * len(outcomes), 13)
        figure, columns = plt.subplots(
            4, len(outcomes), figsize=size, dpi=130, sharex="col", sharey="row", squeeze=False
        )
        for place, outcome in enumerate(outcomes):
            _column([row[place] for row in columns], outcome)
        figure.tight_layout(h_pad=3)
        figure.savefig(path)
        plt.close(figure)


def _column(rows: Sequence[Axes], outcome: Outcome) -> None:
    title(rows[0], f"Wait by class · {outcome.policy}", "seconds · thick: p50, thin: p99")
    _waits(rows[0], outcome, lambda one: one.work.request_class, CLASSES)
    by_tokens = sorted(outcome.served, key=lambda name: -outcome.served[name])[:_TENANTS]
    title(rows[1], "Wait by tenant", "seconds · the tenants with the most tokens")
    _waits(rows[1], outcome, lambda one: one.work.tenant, sorted(by_tokens))
    title(rows[2], "Slots", "used, of all, and requests that wait (dotted)")
    _slots(rows[2], outcome)
    title(rows[3], "KV cache", "share that sequences occupy, by engine")
    for place, engine in enumerate(outcome.engines):
        taken = engine.samples.taken
        rows[3].plot(
            [one[0] for one in taken],
            [one[1] for one in taken],
            color=COLOURS[place % len(COLOURS)],
            linewidth=1,
        )
    rows[3].set_ylim(0, 1)
    rows[3].set_xlabel("seconds")
    for axes in rows:
        axes.grid(axis="y", color=FAINT, zorder=0)
        axes.tick_params(which="both", length=0)


def _waits(
    axes: Axes, outcome: Outcome, group: Callable[[Record], str], names: Sequence[str]
) -> None:
    """Requests by the time of their arrival."""
    width_s = (outcome.end_s or 1.0) / _BINS
    for place, name in enumerate(names):
        bins: dict[int, list[float]] = {}
        for record in outcome.records:
            if record.started_s is not None and group(record) == name:
                bins.setdefault(int(record.arrived_s / width_s), []).append(record.wait_s)
        if not bins:
            continue
        at_s = [(place_of + 0.5) * width_s for place_of in sorted(bins)]
        colour = COLOURS[place % len(COLOURS)]
        style: dict[str, Any] = {"color": colour, "marker": ".", "markersize": 4}
        for percent, line in ((50, {"linewidth": 2.0, "label": name}), (99, {"linewidth": 0.8})):
            values = [percentile(bins[key], percent) for key in sorted(bins)]
            axes.plot(at_s, values, **style, **line)
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set_ylim(bottom=0)
    axes.legend(**LEGEND)


def _slots(axes: Axes, outcome: Outcome) -> None:
    changes = waiting_and_running(outcome.records, outcome.end_s)
    at_s = [one[0] for one in changes]
    slots = outcome.cluster.slots
    axes.step(at_s, [one[2] / slots for one in changes], color=COLOURS[0], where="post")
    axes.set_ylim(0, 1.05)
    beside = axes.twinx()
    beside.step(
        at_s, [one[1] for one in changes], color=COLOURS[1], where="post", linestyle=(0, (2, 2))
    )
    beside.set_ylim(bottom=0)
