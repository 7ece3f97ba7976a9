"""`scripts/simulate`: simulate what is asked for, print, and write."""

import json
import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from serve_app.errors import SettingsError

from . import works
from .arguments import make_parser
from .figures import Figures, figures
from .presets import PRESETS, cluster_of
from .simulate import simulate
from .table import show


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit status."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if (options.preset is None) == (options.work is None):
        parser.error("give one of --preset and --work")
    console = Console(width=None if sys.stdout.isatty() else 130)
    try:
        runs = _simulate(options, console)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    _write(options, arguments, runs)
    return 0


def _simulate(options: Namespace, console: Console) -> list[Figures]:
    chosen = PRESETS.get(options.preset)
    cluster = cluster_of(
        chosen,
        options.engine,
        options.replicas,
        options.slots,
        options.ingresses,
        options.gather_ms,
    )
    runs: list[Figures] = []
    for seed in options.seeds:
        plan = chosen.make(cluster, seed) if chosen else works.plan(options, cluster, seed)
        for policy in options.policy or ["hermes"]:
            outcome = simulate(plan.cluster, plan.sources, policy, plan.until_s, plan.faults)
            found = figures(outcome, seed, dict(plan.slos))
            title = f"{options.preset or options.work} · {policy} · seed {seed}"
            show(console, found, f"{title} · {cluster.engine.name}")
            runs.append(found)
    return runs


def _write(options: Namespace, arguments: Sequence[str], runs: Sequence[Figures]) -> None:
    if options.json_path is not None:
        document = {
            "command": ["scripts/simulate", *arguments],
            "runs": [_without_nan(asdict(found)) for found in runs],
        }
        options.json_path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"wrote {options.json_path}", file=sys.stderr)


def _without_nan(value: Any) -> Any:
    """JSON has no NaN: what does not exist is null."""
    if isinstance(value, dict):
        return {name: _without_nan(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
