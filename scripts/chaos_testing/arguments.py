"""The command line of `scripts/chaos`."""

from __future__ import annotations

import argparse
from pathlib import Path

from scripts.chaos_testing.faults import FAULTS, REAL, SIMULATED
from scripts.chaos_testing.prompts import MIXES


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/chaos",
        description="Run mixed traffic on a real service (Ray Serve, Redis, HAProxy) while its "
        "processes are killed at random. Prints the outcome of the requests; exits "
        "with 1 if one was lost, duplicated or corrupted. `scripts/chaos failover` kills the "
        "primary of three Redis with Sentinel: see scripts/chaos failover --help.",
    )
    parser.add_argument("--minutes", type=float, help="how long to inject faults (3)")
    parser.add_argument(
        "--engine",
        choices=("simulated", "vllm"),
        default="simulated",
        help="`simulated` needs no model",
    )
    parser.add_argument(
        "--mix",
        choices=tuple(MIXES),
        default="plain",
        help="`real` (with --engine vllm): also JSON schemas, forced tools, logprobs, penalties, "
        "n=2 and seeds",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of traffic and faults (0)")
    parser.add_argument("--users", type=int, help="concurrent users (24; vllm: 6)")
    parser.add_argument(
        "--every-s", type=float, help="mean time between faults (7; vllm: 20; with --strikes: 3)"
    )
    parser.add_argument("--tokens", help="tokens of a response, from,to (20,300; vllm: 16,120)")
    parser.add_argument(
        "--faults", help=f"only these faults, separated by commas: {', '.join(FAULTS)}"
    )
    parser.add_argument(
        "--apart",
        action="store_true",
        help="inject each fault only after the service has recovered completely, to measure the "
        "recovery time of each kind",
    )
    parser.add_argument(
        "--strikes",
        type=int,
        metavar="N",
        help="like --apart, and stop after N faults, each with streams in flight; --minutes (5 "
        "per fault) is the limit",
    )
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument(
        "--logs", type=Path, help="copy the logs of the service's processes to this folder"
    )
    parser.add_argument(
        "--without-fencing",
        action="store_true",
        help="turn off the journal's fencing, to check that this command can fail (it must then "
        "report damage)",
    )
    options = parser.parse_args(arguments)
    real = options.engine == "vllm"
    if options.mix != "plain" and not real:
        parser.error("--mix real needs --engine vllm")
    options.users = options.users or (6 if real else 24)
    options.tokens = tuple(
        map(int, (options.tokens or ("16,120" if real else "20,300")).split(","))
    )
    options.every_s = options.every_s or (3.0 if options.strikes else 20.0 if real else 7.0)
    options.apart = options.apart or bool(options.strikes)
    options.minutes = options.minutes or (5.0 * options.strikes if options.strikes else 3.0)
    options.names = (
        options.faults.split(",") if options.faults else list(REAL if real else SIMULATED)
    )
    unknown = [name for name in options.names if name not in FAULTS]
    if unknown:
        parser.error(f"no such fault: {', '.join(unknown)}")
    return options
