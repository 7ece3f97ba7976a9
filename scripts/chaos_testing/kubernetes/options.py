"""The options of `scripts/chaos --kubernetes`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from scripts.local.environment import ROOT

NAMES = (
    "engine",
    "ingress",
    "head",
    "redis-pod",
    "redis-kill",
    "drain",
    "cut",
    "scale",
    "upgrade",
)
"""Every fault, in the order of a run."""
_ASK_FIRST = ("cut",)
"""Faults that only a flag of their own allows."""


@dataclass(frozen=True)
class Options:
    """What the command line says. `minutes` is None: every fault once."""

    release: str
    namespace: str
    context: str
    key_secret: str
    faults: tuple[str, ...]
    allow_shared_nodes: bool
    minutes: float | None
    seed: int
    users: int
    tokens: int
    compare: str
    chart: Path
    json: Path | None
    dry_run: bool


def parse(arguments: list[str]) -> Options:
    """Parse the command line, without `--kubernetes`."""
    parser = _parser()
    read = parser.parse_args(arguments)
    chosen = tuple(read.faults.split(",")) if read.faults else NAMES
    if unknown := [name for name in chosen if name not in NAMES]:
        parser.error(f"no such fault: {', '.join(unknown)}")
    if read.faults and "cut" in chosen and not read.allow_node_cut:
        parser.error("the fault `cut` needs --allow-node-cut")
    if not read.allow_node_cut:
        chosen = tuple(name for name in chosen if name not in _ASK_FIRST)
    return Options(
        release=read.release,
        namespace=read.namespace,
        context=read.context,
        key_secret=read.key_secret,
        faults=chosen,
        allow_shared_nodes=read.allow_shared_nodes,
        minutes=read.minutes,
        seed=read.seed,
        users=read.users,
        tokens=read.tokens,
        compare=read.compare,
        chart=read.chart,
        json=read.json,
        dry_run=read.dry_run,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/chaos --kubernetes",
        description="Break a release of the Helm chart in your own cluster, one fault after "
        "another, while a client pod streams from it and compares every text. Prints a table; "
        "exits with 1 if a text was lost, duplicated, corrupted or ended by an error, or if the "
        "service did not come back. It uses kubectl and helm from PATH, touches only what belongs "
        "to the release, and removes what it created, after Ctrl-C, too.",
    )
    add = parser.add_argument
    add("--release", required=True, help="the Helm release")
    add("--namespace", default="default", help="its namespace (default)")
    add("--context", default="", help="the context of kubectl and helm (the current one)")
    add(
        "--key-secret",
        default="",
        metavar="SECRET/ENTRY",
        help="the Secret with an API key in the clear (the one of `helm test`)",
    )
    add("--faults", help=f"only these, separated by commas: {', '.join(NAMES)} (all but cut)")
    add(
        "--allow-node-cut",
        action="store_true",
        help="also cut the release's pods on one node off the network for half a minute",
    )
    add(
        "--allow-shared-nodes",
        action="store_true",
        help="drain a node that runs others' pods, too: theirs stay, but the node takes no new "
        "pods meanwhile",
    )
    add("--minutes", type=float, help="repeat the faults at random for so long (each once)")
    add("--seed", type=int, default=0, help="seed of victims and of the order of repetitions (0)")
    add("--users", type=int, default=8, help="concurrent streams (8)")
    add("--tokens", type=int, default=300, help="tokens of each stream (300)")
    add(
        "--compare",
        choices=("auto", "before", "record"),
        default="auto",
        help="compare each text with the one of before the faults, or with the service's own "
        "record of the request (auto: before, if the model answers the same under load)",
    )
    add(
        "--chart",
        type=Path,
        default=ROOT / "helm" / "hermes-serve",
        help="the chart for the upgrade, of the version that is installed (this checkout's)",
    )
    add("--json", type=Path, help="write every figure to this file")
    add("--dry-run", action="store_true", help="only read, and print the commands")
    return parser
