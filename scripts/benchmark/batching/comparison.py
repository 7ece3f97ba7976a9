"""`scripts/bench --batching`: measure the batchers in turn, print, write."""

import sys
from collections.abc import Sequence
from dataclasses import asdict

from serve_app.errors import SettingsError

from ..errors import SystemFailed
from ..options import Options
from ..report import write_document
from ..rounds import wanted_shape, warm_up
from ..systems import System
from . import table
from .rounds import BatchRounds
from .row import BatchRow
from .summary import ratios
from .virtual_rounds import VirtualRounds


def compare(options: Options, arguments: Sequence[str], system: System) -> int:
    """Compare the batchers of ``options`` in front of ``system``; the command's exit status."""
    shape = wanted_shape(options, system)
    warm_up(options, system, shape)
    return _report(options, arguments, BatchRounds(options, system, shape))


def compare_virtually(options: Options, arguments: Sequence[str]) -> int:
    """The same in front of the model of an engine, in virtual time."""
    try:
        rounds = VirtualRounds(options)
    except SettingsError as wrong:
        raise SystemFailed(str(wrong)) from None
    return _report(options, arguments, rounds)


def _report(options: Options, arguments: Sequence[str], rounds: BatchRounds | VirtualRounds) -> int:
    print(table.heading(), flush=True)
    rows = rounds.take_turns(lambda row: print(table.line(row), flush=True))
    print(f"\n{table.summary(rows)}")
    if rounds.capacity_per_s:
        print(f"\n100 %: {rounds.capacity_per_s:.1f} requests/s")
    _write(options, arguments, rows, rounds.capacity_per_s)
    return 1 if any(row.errors for row in rows) else 0


def _write(
    options: Options, arguments: Sequence[str], rows: Sequence[BatchRow], capacity_per_s: float
) -> None:
    if options.json_path is not None:
        found = {
            "capacity_requests_per_s": capacity_per_s or None,
            "batch_rows": [asdict(row) for row in rows],
            "batch_ratios": [asdict(one) for one in ratios(rows)],
        }
        write_document(options.json_path, arguments, found)
        print(f"wrote {options.json_path}", file=sys.stderr)
    if options.plot_path is not None:
        from . import picture  # matplotlib is among the packages of the tests

        picture.draw(options.plot_path, rows)
        print(f"wrote {options.plot_path}", file=sys.stderr)
