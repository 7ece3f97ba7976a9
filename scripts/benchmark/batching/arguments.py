"""The command line's words for `--batching`."""

import argparse
from collections.abc import Callable

from .specification import DEFAULT, Specification, parse

ABOUT = """\
batchers (--batching): each stands between the users and the endpoint, in this process.
  serial                    one request at a time
  static:N                  waits for N requests, runs them, waits for all to end, and only then
                            takes the next N (of fewer than N users: all of them)
  dynamic:N/wait_ms/tokens  the same, but a batch is complete at N requests, or when the next one
                            would make more than so many tokens (prompt and output), or when its
                            oldest request has waited for wait_ms
  async:N                   N at a time, first in, first out; one that ends makes room for the next
  continuous                everything straight to the engine's own continuous batching
  tuned                     async with a window that doubles from 8 to 64 above a load of 0.7 and
                            halves below 0.5; load: requests that run or wait, per slot; looked at
                            ten times a second
  hybrid:N                  N slots (64); while both wait, interactive requests get 70 % of them and
                            batch work 30 %; whoever waits alone gets all
  split:N/size/wait_ms/tokens
                            interactive requests as with async:N, batch work as with dynamic, each
                            in slots of its own
  Output lengths are mixed: log-uniform from a sixteenth of --max-tokens to all of it; 70 % of the
  requests are interactive. All batchers of a round get the same lengths and arrivals. A run sends
  for --duration-s; what was sent gets as long again to end, the rest is unfinished, and counts in
  the latencies with the time that it had waited by then (≥)."""


def add_batching(group: argparse._ArgumentGroup, counts: Callable[[str], tuple[int, ...]]) -> None:
    """Add the options to ``group``; ``counts`` reads a list of numbers."""
    add = group.add_argument
    add(
        "--batching",
        type=_batchers,
        nargs="?",
        const=_batchers(DEFAULT),
        default=(),
        metavar="B,B",
        help=f"compare batchers in front of one system ({DEFAULT})",
    )
    add(
        "--load-percent",
        type=counts,
        default=(),
        metavar="P,P",
        help="with --batching: open loops at P %% of the capacity, which is measured first at the "
        "highest --concurrency, instead of closed loops",
    )
    add(
        "--virtual",
        nargs="?",
        const="tiny-cpu",
        default="",
        metavar="ENGINE",
        help="with --batching, in place of a system: the model of an engine in virtual time, as "
        "scripts/simulate has it (tiny-cpu)",
    )


def _batchers(text: str) -> tuple[Specification, ...]:
    try:
        return parse(text)
    except ValueError as unknown:
        raise argparse.ArgumentTypeError(str(unknown)) from None
