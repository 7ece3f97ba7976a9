"""The command line's words for `--order`."""

import argparse

ORDERS = ("backlog", "long-among-short")
ROUNDS = 7

ABOUT = """\
the order of work (--order): one system, the real engine, rounds on a service that keeps running.
  backlog                   as many users as the largest --concurrency, which should be more than
                            the engine can hold, with the output lengths of --batching. Without a
                            pause between the rounds, the engine's own metrics page is read five
                            times a second: how many requests wait in the engine, how many it has
                            preempted, how much of its KV cache is used
  long-among-short          short requests of --max-tokens at --rate (6), in turns alone and
                            beside as many generations of --long-tokens as the engine has --slots,
                            which have all begun before the first short request is sent. The texts
                            of the long ones are compared with those that the same prompts gave
                            before, with nothing beside them
  --set makes the engine small, so that its KV cache is what bounds it:
    scripts/bench --serve --order backlog --concurrency 160 --max-tokens 512 \\
      --set engine.args.max_model_len=1024 --set engine.args.num_gpu_blocks_override=64
  long-among-short sets workers.max_running_requests to --slots; with more than that, the second
  command tells what the long ones cost the short ones where nobody waits for a slot:
    scripts/bench --serve --order long-among-short --max-tokens 32
    scripts/bench --serve --order long-among-short --max-tokens 32 \\
      --set workers.max_running_requests=64"""


def add_order(group: argparse._ArgumentGroup) -> None:
    """Add the options to ``group``."""
    add = group.add_argument
    add("--order", default="", choices=("", *ORDERS), metavar="WHAT", help=" | ".join(ORDERS))
    add(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="NAME=VALUE",
        help="with --serve: a setting of the service, such as order.claim_ahead=2; may be repeated",
    )
    add(
        "--slots",
        type=int,
        default=4,
        metavar="N",
        help="with long-among-short: requests that the engine runs at a time (%(default)s)",
    )
    add(
        "--long-tokens",
        type=int,
        default=3500,
        metavar="N",
        help="with long-among-short: output of a long generation (%(default)s)",
    )
    add(
        "--settle-s",
        type=float,
        default=0.0,
        metavar="S",
        help="with backlog: time under load before the first round, in which the service learns "
        "how much fits (%(default)s)",
    )
    add(
        "--metrics-url",
        default="",
        metavar="URL",
        help="the page with vLLM's metrics (default: the engine's own with --serve, else /metrics)",
    )
