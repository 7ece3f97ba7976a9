"""The command line's words: every option with its help, and the examples."""

import argparse
import json
import os
from pathlib import Path

from .batching.arguments import ABOUT as ABOUT_BATCHERS
from .batching.arguments import add_batching
from .order.arguments import ABOUT as ABOUT_ORDER
from .order.arguments import add_order

PEERS = ("bare-vllm", "ray-serve-llm", "ray-serve-llm-tuned")
ENDPOINTS = ("chat/completions", "completions", "responses")
_ENGINE_ARGS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 4096}
TINY_MODEL = str(Path(__file__).resolve().parents[2] / "workers/tiny_model")

_USAGE = "scripts/bench [--url URL | --serve] [--against PEER …] [options]"
_ABOUT = """\
Load on OpenAI endpoints, and an honest account of what it cost: throughput, latencies, errors and
CPU by kind of process. Against peers the runs alternate (A B C A B C …) and the ratios are taken
round by round, so that they hold on a noisy machine. Whatever this command starts, it ends."""

_EPILOG = f"""\
examples:
  a service that runs already:
    scripts/bench --url http://127.0.0.1:8000/v1
  the same under 20 arrivals a second for half a minute:
    scripts/bench --url http://127.0.0.1:8000/v1 --rate 20 --duration-s 30
  start everything, compare three systems, keep the figures and a picture:
    scripts/bench --serve --against bare-vllm --against ray-serve-llm --json out.json --plot out.png
  what a token and a request cost, by kind of process:
    scripts/bench --serve --concurrency 32 --cost-model
  a peer alone:
    scripts/bench --against bare-vllm --concurrency 1,8
  batchers side by side, in front of the engine alone:
    scripts/bench --against bare-vllm --batching --rounds 7 --max-tokens 64 --duration-s 2

{ABOUT_BATCHERS}

{ABOUT_ORDER}

how to read the figures:
  Throughput counts the tokens of the time in which load was kept up (at least one response for
  every user); the tail after it counts for latency and CPU only. TTFT runs from sending (with
  --rate: from the scheduled arrival) to the first event of a token. Gaps are between reads of the
  socket: what a server sends in one piece has gaps of 0. CPU is user and system time from /proc of
  a system's processes, without the load generator, whose share stands beside it.
  A stream without its last event, a status other than 200 or a response with too few tokens is an
  error.

exit status: 0; 1 when a request failed; 2 when a system did not start; 130 when interrupted."""


def make_parser() -> argparse.ArgumentParser:
    """The parser; what it returns has the names of ``Options``' fields."""
    parser = argparse.ArgumentParser(
        "scripts/bench",
        usage=_USAGE,
        description=_ABOUT,
        epilog=_EPILOG,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=26, width=108
        ),
    )
    _add_systems(parser.add_argument_group("what to measure"))
    _add_load(parser.add_argument_group("the load"))
    add_batching(parser.add_argument_group("batchers side by side"), _counts)
    add_order(parser.add_argument_group("the order of work"))
    _add_output(parser.add_argument_group("output"))
    return parser


def _add_systems(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    engine = json.dumps(_ENGINE_ARGS)
    key = os.environ.get("OPENAI_API_KEY", "none")
    peers = ", ".join(PEERS)
    add("--url", default="", help="a running OpenAI endpoint, such as http://127.0.0.1:8000/v1")
    add("--serve", action="store_true", help="start this repository's service (one engine replica)")
    add("--name", default="hermes-serve", help="its name in the tables (%(default)s)")
    add(
        "--against",
        action="append",
        default=[],
        choices=PEERS,
        metavar="PEER",
        help=f"start it too: {peers}",
    )
    add(
        "--rounds",
        type=_positive,
        default=0,
        metavar="N",
        help="runs of every system and load (3 with peers, else 1)",
    )
    add(
        "--model",
        default="",
        metavar="NAME",
        help="the model's name at the endpoint (default: the first that it lists)",
    )
    add(
        "--model-path",
        default=TINY_MODEL,
        metavar="DIR",
        help="the weights to serve (workers/tiny_model)",
    )
    add(
        "--engine-args",
        type=json.loads,
        default=engine,
        metavar="JSON",
        help="engine options of the peers (%(default)s)",
    )
    add("--api-key", default=key, metavar="KEY", help="($OPENAI_API_KEY)")
    add(
        "--ready-timeout-s",
        type=float,
        default=300,
        metavar="S",
        help="time limit for each system's start (%(default)s)",
    )
    roots = "with --url: count this process and its descendants; may be repeated"
    match = (
        "with --url: count processes with this in their arguments or environment, such as the "
        "state directory"
    )
    add(
        "--root-pid",
        type=int,
        action="append",
        default=[],
        dest="root_pids",
        metavar="PID",
        help=roots,
    )
    add("--match", action="append", default=[], metavar="TEXT", help=match)


def _add_load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    counts = (1, 8, 32, 128)
    add(
        "--concurrency",
        type=_counts,
        default=counts,
        metavar="N,N",
        help="closed loops of N users (1,8,32,128)",
    )
    add(
        "--rate",
        type=float,
        default=0.0,
        dest="rate_per_s",
        metavar="R",
        help="open loop: Poisson arrivals/s",
    )
    add(
        "--requests",
        type=_positive,
        default=0,
        metavar="N",
        help="end each run after N requests instead of by time",
    )
    add(
        "--duration-s",
        type=float,
        default=10.0,
        metavar="S",
        help="minimum length of each run (%(default)s)",
    )
    add(
        "--endpoint",
        default=ENDPOINTS[0],
        choices=ENDPOINTS,
        metavar="E",
        help=" | ".join(ENDPOINTS),
    )
    add(
        "--no-stream",
        action="store_false",
        dest="stream",
        help="request responses that are not streamed",
    )
    add(
        "--max-tokens",
        type=_positive,
        default=128,
        metavar="N",
        help="output tokens per response (%(default)s)",
    )
    add(
        "--prompt-tokens",
        type=_positive,
        default=64,
        metavar="N",
        help="approximate prompt length (%(default)s)",
    )
    add(
        "--no-ignore-eos",
        action="store_false",
        dest="ignore_eos",
        help="do not send vLLM's `ignore_eos` extension",
    )
    add(
        "--sessions",
        type=_positive,
        default=0,
        metavar="N",
        help="send the x-session-id of one of N sessions",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of prompts, sessions and arrivals (%(default)s)",
    )
    add(
        "--timeout-s",
        type=float,
        default=120.0,
        metavar="S",
        help="time limit of each request (%(default)s)",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--cost-model",
        action="store_true",
        help="split CPU into µs per token and ms per request (last load)",
    )
    add(
        "--json",
        type=Path,
        dest="json_path",
        metavar="FILE",
        help="write machine, versions, command and every row as JSON",
    )
    add("--plot", type=Path, dest="plot_path", metavar="FILE", help="write a picture (PNG)")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))
