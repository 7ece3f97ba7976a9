"""`scripts/simulate`: the command line, the work that it names, and what is printed and written."""

import argparse
import json
import math
import random
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from serve_app.errors import SettingsError

from . import traces
from .engines import engine_names
from .figures import Figures, figures, show
from .policies import POLICIES
from .presets import DEFAULT_ENGINE, PRESETS, Plan, capacity_per_s, cluster_of, speed_for
from .service import Cluster, Source, simulate
from .traces import Cast
from .work import Work
from .workloads import Lengths, bursts, open_loop, schedule

WORKS = (*traces.TIMED, "poisson", "bursts")

_ABOUT = """\
The service's order of work in virtual time: its own dispatcher, scheduler and placement on modelled
engines. docs/simulator.md says what is modelled, and how well."""


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit status."""
    parser = _make_parser()
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
        plan = chosen.make(cluster, seed) if chosen else _plan(options, cluster, seed)
        for policy in options.policy or ["hermes"]:
            outcome = simulate(plan.cluster, plan.sources, policy, plan.until_s)
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


def _plan(options: Namespace, cluster: Cluster, seed: int) -> Plan:
    """The work that `--work` names: a trace, or arrivals drawn by the seed.

    Raises:
        SettingsError: the file of the trace is absent.
    """
    cast = Cast(seed, options.tenants)
    if options.work in traces.TIMED:
        found = list(traces.TIMED[options.work](cast, cluster.engine.block_size))
        source = _timed(found[: options.requests or None], options, cluster)
    else:
        source = _drawn(options, cluster, cast)
    return Plan(cluster, [source], options.until_s)


def _drawn(options: Namespace, cluster: Cluster, cast: Cast) -> Source:
    prompt, output = Lengths(options.prompt_tokens), Lengths(options.output_tokens)

    def make(rng: random.Random) -> Work:
        tenant, request_class = cast.draw(rng.random())
        return Work(prompt.draw(rng), output.draw(rng), tenant=tenant, request_class=request_class)

    cv = options.cv if options.work == "bursts" else 1.0
    rate_per_s = (options.load or 0.8) * capacity_per_s(cluster, make)
    seed = str(cast.seed)
    return open_loop(bursts(rate_per_s, cv, options.duration_s, seed), make, seed)


def _timed(found: list[tuple[float, Work]], options: Namespace, cluster: Cluster) -> Source:
    """As fast as the trace, or as `--load` says."""
    speed = speed_for(found, cluster, options.load) if options.load else 1.0
    return schedule(lambda: ((at_s / speed, work) for at_s, work in found))


def _epilog() -> str:
    presets = "\n".join(f"  {name:<24}{one.about}" for name, one in sorted(PRESETS.items()))
    return f"""\
presets:
{presets}

engines: {", ".join(engine_names())}, or a file of your own (NAME.json)

examples:
  scripts/simulate --preset flood --policy hermes --policy fcfs
  scripts/simulate --preset mixed --seeds 1,2,3 --json out.json
  scripts/simulate --work azure --load 0.9 --requests 5000 --policy hermes --policy fcfs
  scripts/simulate --preset clients --policy hermes --policy fcfs --policy oracle
  scripts/simulate --preset conversations --engine estimate-h100-llama-8b --replicas 2
  scripts/simulate --preset two-tenants --engine estimate-h100-llama-8b --slots 128

exit status: 0; 2 when something that is needed is missing"""


def _make_parser() -> argparse.ArgumentParser:
    """Every option with its help."""
    parser = argparse.ArgumentParser(
        "scripts/simulate",
        description=_ABOUT,
        epilog=_epilog(),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=26, width=108
        ),
    )
    work = parser.add_argument_group("the work")
    work.add_argument("--preset", choices=sorted(PRESETS), metavar="NAME", help="a named workload")
    work.add_argument(
        "--work",
        choices=WORKS,
        metavar="NAME",
        help=f"a trace of $HERMES_DATA, or drawn by the seed: {', '.join(WORKS)}",
    )
    _add_work(work)
    work.add_argument(
        "--seeds", type=_numbers, default=(1,), metavar="N,N", help="one simulation for each (1)"
    )
    cluster = parser.add_argument_group("the service")
    cluster.add_argument(
        "--policy",
        action="append",
        default=[],
        choices=sorted(POLICIES),
        help="the order of work: what runs live (hermes), by arrival (fcfs), hermes with every "
        "length known (oracle), and that without ageing (shortest); may be repeated",
    )
    cluster.add_argument(
        "--engine", default=DEFAULT_ENGINE, metavar="NAME", help="the engine (%(default)s)"
    )
    cluster.add_argument(
        "--replicas", type=_positive, default=1, metavar="N", help="engines (%(default)s)"
    )
    cluster.add_argument(
        "--slots",
        type=_positive,
        default=0,
        metavar="N",
        help="requests that one engine runs at a time (the preset's, or 128)",
    )
    cluster.add_argument(
        "--ingresses", type=_positive, default=1, metavar="N", help="ingresses (%(default)s)"
    )
    cluster.add_argument(
        "--gather-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="how long a claim waits for more after the first arrival; live: not at all (0)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, dest="json_path", metavar="FILE", help="all figures")
    return parser


def _add_work(work: argparse._ArgumentGroup) -> None:
    """What `--work` can be told."""
    numbers: tuple[tuple[str, str, float, str], ...] = (
        ("--load", "load", 0.0, "arrivals as a share of what the cluster can do (drawn: 0.8)"),
        ("--cv", "cv", 3.0, "of bursts: coefficient of variation of the gaps (3)"),
        ("--duration-s", "duration_s", 300.0, "for how long requests arrive (300)"),
        ("--prompt-tokens", "prompt_tokens", 200, "median, drawn log-normally (200)"),
        ("--output-tokens", "output_tokens", 150, "median, drawn log-normally (150)"),
    )
    for name, field, default, text in numbers:
        work.add_argument(name, dest=field, type=float, default=default, metavar="X", help=text)
    counts = (
        ("--requests", 0, "of a trace: no more than so many"),
        ("--tenants", 4, "where the work names none (4)"),
    )
    for name, default, text in counts:
        work.add_argument(name, type=_positive, default=default, metavar="N", help=text)
    work.add_argument(
        "--until-s", type=float, metavar="S", help="stop there, whatever is still open"
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
