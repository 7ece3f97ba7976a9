"""`scripts/bench`: start what is asked for, measure in turns, print, write, and end what was
started.
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from . import interrupts, report, table
from .batching.comparison import compare, compare_virtually
from .cost_model import cost_model
from .errors import SystemFailed
from .options import Options, parse
from .order.comparison import measure_order
from .rounds import Turns, take_turns
from .systems import System, existing, start_bare_vllm, start_own, start_ray_serve_llm

_PEERS: dict[str, Callable[[Options, Path], System]] = {
    "bare-vllm": start_bare_vllm,
    "ray-serve-llm": start_ray_serve_llm,
    "ray-serve-llm-tuned": lambda options, folder: start_ray_serve_llm(options, folder, tuned=True),
}


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit status: 0, 1 when a request failed, 2 when a system did not
    start.
    """
    options = parse(arguments)
    interrupts.install()
    if options.plot_path is not None and find_spec("matplotlib") is None:
        print(
            "scripts/bench --plot draws with matplotlib: run `scripts/test unit` once",
            file=sys.stderr,
        )
        return 2
    with ExitStack() as stack:
        # Short, because sockets live below it.
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
            )
        )
        try:
            if options.virtual:
                return compare_virtually(options, arguments)
            systems = _start(options, folder, stack)
            if options.batching:
                return compare(options, arguments, systems[0])
            if options.order:
                return measure_order(options, arguments, systems[0])
            turns = _measure(options, systems)
        except SystemFailed as failed:
            print(failed, file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("\ninterrupted: stopping everything that was started", file=sys.stderr)
            return 130
    _write(options, arguments, turns)
    return 1 if any(row.errors for row in turns.rows + turns.cost_rows) else 0


def _start(options: Options, folder: Path, stack: ExitStack) -> list[System]:
    starts: list[Callable[[Options, Path], System]] = []
    if options.url:
        starts.append(lambda options, _: existing(options))
    if options.serve:
        starts.append(start_own)
    starts.extend(_PEERS[name] for name in options.against)
    systems: list[System] = []
    for start in starts:
        system = start(options, folder)
        stack.callback(system.end)
        systems.append(system)
        print(f"{system.name} serves {system.model} on {system.url}", file=sys.stderr)
    return systems


def _measure(options: Options, systems: Sequence[System]) -> Turns:
    print(table.heading(), flush=True)
    turns = take_turns(options, systems, lambda row: print(table.line(row), flush=True))
    print(table.LEGEND)
    print(f"\n{table.cpu_by_kind(turns.rows)}")
    if len(systems) > 1:
        print(f"\n{table.comparison(turns.rows)}")
    if turns.cost_rows:
        print(f"\n{table.costs(cost_model(turns.cost_rows))}")
    return turns


def _write(options: Options, arguments: Sequence[str], turns: Turns) -> None:
    if options.json_path is not None:
        report.write(
            options.json_path, arguments, turns.rows, turns.cost_rows, cost_model(turns.cost_rows)
        )
        print(f"wrote {options.json_path}", file=sys.stderr)
    if options.plot_path is not None:
        from . import plot  # matplotlib is among the packages of the tests

        plot.draw(options.plot_path, turns.rows)
        print(f"wrote {options.plot_path}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
