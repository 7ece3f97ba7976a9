"""The command line of `scripts/simulate`."""

import argparse
from pathlib import Path

from .engines import engine_names
from .policies import POLICIES
from .presets import DEFAULT_ENGINE, PRESETS
from .works import WORKS

_ABOUT = """\
The service's order of work in virtual time: its own dispatcher, scheduler and placement on modelled
engines. docs/simulator.md says what is modelled, and how well."""


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
  scripts/simulate --work sessions --engine estimate-h100-llama-8b --replicas 2
  scripts/simulate --preset two-tenants --engine estimate-h100-llama-8b --slots 128

exit status: 0; 2 when something that is needed is missing"""


def make_parser() -> argparse.ArgumentParser:
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
        ("--speed", "speed", 1.0, "a trace so many times as fast (1)"),
        ("--rate", "rate_per_s", 0.0, "arrivals per second, in place of --load"),
        ("--cv", "cv", 3.0, "of bursts: coefficient of variation of the gaps (3)"),
        ("--duration-s", "duration_s", 300.0, "for how long requests arrive (300)"),
        ("--think-s", "think_s", 0.0, "mean time between an answer and the next request"),
        ("--prompt-tokens", "prompt_tokens", 200, "median, drawn log-normally (200)"),
        ("--output-tokens", "output_tokens", 150, "median, drawn log-normally (150)"),
    )
    for name, field, default, text in numbers:
        work.add_argument(name, dest=field, type=float, default=default, metavar="X", help=text)
    counts = (
        ("--requests", 0, "of a trace: no more than so many"),
        ("--users", 0, "closed-loop: users (twice the slots)"),
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
