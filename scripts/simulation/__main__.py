"""`scripts/simulate`: the command line, and what is printed and written."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from scripts.benchmark.options import counts, make_parser, positive
from scripts.benchmark.report import write_document
from serve_app.errors import SettingsError

from .engine_model import engine_names, load_engine
from .figures import Figures, figures, table
from .policies import POLICIES
from .presets import PRESETS
from .service import Cluster, simulate

_ABOUT = """\
The service's order of work in virtual time: its own dispatcher, scheduler and placement on modelled
engines. docs/evidence/simulator.md says what is modelled, and how well."""


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    try:
        runs = _simulate(options)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    write_document(options, ["scripts/simulate", *arguments], runs=runs)
    return 0


def _simulate(options: Namespace) -> list[Figures]:
    chosen = PRESETS[options.preset]
    cluster = Cluster(
        load_engine(options.engine),
        options.replicas,
        options.slots or chosen.slots,
        options.ingresses,
        options.gather_ms,
    )
    runs: list[Figures] = []
    for seed in options.seeds:
        plan = chosen.make(cluster, seed)
        for policy in options.policy or ["hermes"]:
            outcome = simulate(plan.cluster, plan.sources, policy, plan.until_s)
            found = figures(outcome, seed)
            title = f"{options.preset} · {policy} · seed {seed}"
            print(table(found, f"{title} · {cluster.engine.name}"), flush=True)
            runs.append(found)
    return runs


def _epilog() -> str:
    presets = "\n".join(f"  {name:<24}{one.about}" for name, one in sorted(PRESETS.items()))
    return f"""\
presets:
{presets}

engines: {", ".join(engine_names())}, or a file of your own (NAME.json)

examples:
  scripts/simulate --preset flood --policy hermes --policy fcfs
  scripts/simulate --preset mixed --seeds 1,2,3 --json out.json
  scripts/simulate --preset azure --policy hermes --policy fcfs
  scripts/simulate --preset clients --policy hermes --policy fcfs --policy oracle
  scripts/simulate --preset conversations --engine estimate-h100-llama-8b --replicas 2
  scripts/simulate --preset two-tenants --engine estimate-h100-llama-8b --slots 128

exit status: 0; 2 when something that is needed is missing"""


def _parse(arguments: Sequence[str]) -> Namespace:
    """Every option with its help."""
    parser = make_parser("scripts/simulate", _ABOUT, _epilog())
    work = parser.add_argument_group("the work").add_argument
    work("--preset", choices=sorted(PRESETS), metavar="NAME", required=True, help="a workload")
    work("--seeds", type=counts, default=[1], metavar="N,N", help="one simulation for each (1)")
    cluster = parser.add_argument_group("the service").add_argument
    cluster(
        "--policy",
        action="append",
        choices=sorted(POLICIES),
        help="the order of work: what runs live (hermes), by arrival (fcfs), hermes with every "
        "length known (oracle), and that without ageing (shortest); may be repeated",
    )
    cluster("--engine", default="tiny-cpu", metavar="NAME", help="the engine (%(default)s)")
    cluster("--replicas", type=positive, default=1, metavar="N", help="engines (%(default)s)")
    cluster(
        "--slots",
        type=positive,
        default=0,
        metavar="N",
        help="requests that one engine runs at a time (the preset's)",
    )
    cluster("--ingresses", type=positive, default=1, metavar="N", help="ingresses (%(default)s)")
    cluster(
        "--gather-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="how long a claim waits for more after the first arrival; live: not at all (0)",
    )
    output = parser.add_argument_group("output").add_argument
    output("--json", type=Path, dest="json_path", metavar="FILE", help="all figures")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
