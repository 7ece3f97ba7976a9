"""`scripts/simulate`: simulate what is asked for, print, and write."""

import json
import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from rich.console import Console

from scripts.benchmark.errors import SystemFailed
from serve_app.errors import SettingsError

from . import fitting, works
from .arguments import make_parser
from .figures import Figures, figures
from .presets import PRESETS, cluster_of
from .service import Outcome
from .simulate import simulate
from .table import show


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit status."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    wanted = (options.preset, options.work, options.fit or None, options.errors or None)
    if sum(one is not None for one in wanted) != 1:
        parser.error("give one of --preset, --work, --fit and --errors")
    if options.plot_path is not None and find_spec("matplotlib") is None:
        print(
            "scripts/simulate --plot draws with matplotlib: run `scripts/test unit` once",
            file=sys.stderr,
        )
        return 2
    console = Console(width=None if sys.stdout.isatty() else 130)
    try:
        if options.fit or options.errors:
            (fitting.fit_engine if options.fit else fitting.show_errors)(options, console)
            return 0
        runs = _simulate(options, console)
    except (SettingsError, SystemFailed) as error:
        print(error, file=sys.stderr)
        return 2
    _write(options, arguments, runs)
    return 0


def _simulate(options: Namespace, console: Console) -> list[tuple[Outcome, Figures]]:
    chosen = PRESETS.get(options.preset)
    cluster = cluster_of(
        chosen,
        options.engine,
        options.replicas,
        options.slots,
        options.ingresses,
        options.gather_ms,
    )
    runs: list[tuple[Outcome, Figures]] = []
    for seed in options.seeds:
        plan = chosen.make(cluster, seed) if chosen else works.plan(options, cluster, seed)
        for policy in options.policy or ["hermes"]:
            outcome = simulate(plan.cluster, plan.sources, policy, plan.until_s, plan.faults)
            found = figures(outcome, seed, dict(plan.slos))
            title = f"{options.preset or options.work} · {policy} · seed {seed}"
            show(console, found, f"{title} · {cluster.engine.name}")
            runs.append((outcome, found))
    return runs


def _write(
    options: Namespace, arguments: Sequence[str], runs: Sequence[tuple[Outcome, Figures]]
) -> None:
    if options.json_path is not None:
        document = {
            "command": ["scripts/simulate", *arguments],
            "runs": [_without_nan(asdict(found)) for _, found in runs],
        }
        options.json_path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"wrote {options.json_path}", file=sys.stderr)
    if options.plot_path is not None:
        from . import plot  # matplotlib is among the packages of the tests

        plot.draw(options.plot_path, [outcome for outcome, _ in runs])
        print(f"wrote {options.plot_path}", file=sys.stderr)


def _without_nan(value: Any) -> Any:
    """JSON has no NaN: what does not exist is null."""
    if isinstance(value, dict):
        return {name: _without_nan(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
