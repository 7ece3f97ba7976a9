"""The command line: every option with its help, and which of them make sense together."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from . import batchers

PEERS = ("bare-vllm", "vllm-router", "litellm", "ray-serve-llm", "ray-direct")
SLOTS = 4
"""With --long-among-short: requests that the engine runs at a time."""

_ABOUT = """\
Load on OpenAI endpoints, and an honest account of what it cost: throughput, latencies, errors and
CPU by kind of process. Against peers the runs alternate (A B C A B C …) and the ratios are taken
round by round, so that they hold on a noisy machine. Whatever this command starts, it ends."""

_EPILOG = f"""\
examples, beside those of docs/evidence/performance.md:
  a service that runs already, and the same under 20 arrivals a second for half a minute:
    scripts/bench --url http://127.0.0.1:8000/v1
    scripts/bench --url http://127.0.0.1:8000/v1 --rate 20 --duration-s 30
  what waits and is preempted in an engine whose KV cache is too small for all:
    scripts/bench --serve --batching continuous --concurrency 160 --max-tokens 512 \\
      --set engine.args.max_model_len=1024 --set engine.args.num_gpu_blocks_override=64

{batchers.ABOUT}

how to read the figures:
  Throughput counts the tokens of the time in which load was kept up (at least one response for
  every user); the tail after it counts for latency and CPU only. TTFT runs from sending (with
  --rate: from the scheduled arrival) to the first event of a token. Gaps are between reads of the
  socket: what a server sends in one piece has gaps of 0. CPU is user and system time from /proc of
  a system's processes, without the load generator, whose share stands beside it.
  With --kill a vLLM that has ended is started again at once, as a supervisor does. Of the streams
  in flight, lost are those whose connection broke or that never ended, cut those that the server
  ended early or by an error, doubled those with too much text, and wrong those with another text
  than the same prompt has without a kill (greedy). Throughput and CPU are those of a run without a
  kill just before.
  A stream without its last event, a status other than 200 or a response with too few tokens is an
  error.

exit status: 0; 1 when a request failed; 2 when a system did not start; 130 when interrupted."""


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def counts(text: str) -> list[int]:
    """Such numbers with commas between them."""
    return [positive(part) for part in text.split(",")]


def make_parser(program: str, about: str, epilog: str) -> argparse.ArgumentParser:
    """A parser whose help has one column of options and one of texts."""
    return argparse.ArgumentParser(
        program,
        description=about,
        epilog=epilog,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=26, width=108
        ),
    )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options from the command line; ends the process with a message when they make no sense."""
    parser = make_parser("scripts/bench", _ABOUT, _EPILOG)
    _add_systems(parser.add_argument_group("what to measure"))
    _add_load(parser.add_argument_group("the load"))
    _add_comparisons(parser.add_argument_group("comparisons and output"))
    given = parser.parse_args(arguments)
    if wrong := _contradiction(given):
        parser.error(wrong)
    given.against = list(dict.fromkeys(given.against))
    if given.long_among_short:
        # First, so that one who sets it, too, gets slots that the long ones leave free.
        given.settings.insert(0, f"workers.max_running_requests={SLOTS}")
    if given.embeddings:
        given.max_tokens = 1
    given.rounds = given.rounds or (3 if given.against else 1)
    return given


def _add_systems(group: argparse._ArgumentGroup) -> None:
    add, key = group.add_argument, os.environ.get("OPENAI_API_KEY", "none")
    add("--url", default="", help="a running OpenAI endpoint (http://127.0.0.1:8000/v1)")
    add("--model", default="", help="the model's name at the endpoint (the first that it lists)")
    add("--api-key", default=key, help="($OPENAI_API_KEY)")
    add(
        "--match",
        action="append",
        default=[],
        help="with --url: count processes with this in their arguments or environment, such as the "
        "state directory; may be repeated",
    )
    add("--serve", action="store_true", help="start this repository's service")
    add(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="NAME=VALUE",
        help="with --serve: a setting, such as engine.args.max_model_len=1024; may be repeated",
    )
    peers = f"start it too: {', '.join(PEERS)}"
    add("--against", action="append", default=[], choices=PEERS, metavar="PEER", help=peers)
    add(
        "--replicas",
        type=positive,
        default=1,
        help="of each kind, of all but bare-vllm and ray-serve-llm; vLLMs behind a gateway (1)",
    )
    add(
        "--lateness",
        action="store_true",
        help="how many tokens a busy worker writes together and how long they wait for it, with "
        "--concurrency streams, in virtual time",
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    add, users = group.add_argument, "closed loops of N users (1,8,32,128)"
    add("--concurrency", type=counts, default=[1, 8, 32, 128], metavar="N,N", help=users)
    add("--rate", type=float, default=0.0, help="open loop: Poisson arrivals/s")
    add("--duration-s", type=float, default=10.0, help="minimum length of each run (10)")
    add("--max-tokens", type=positive, default=128, help="output tokens per response (128)")
    add("--prompt-tokens", type=positive, default=64, help="approximate prompt length (64)")
    add(
        "--embeddings",
        action="store_true",
        help="requests for an embedding of the prompt in place of streamed chats; each counts as a "
        "token",
    )
    add("--seed", type=int, default=0, help="seed of prompts and arrivals (0)")
    rounds = "runs of every system and load (3 with peers, else 1)"
    add("--rounds", type=positive, help=rounds)


def _add_comparisons(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--batching",
        type=batchers.parse,
        nargs="?",
        const=batchers.parse(batchers.DEFAULT),
        default=[],
        metavar="B,B",
        help=f"compare batchers in front of one system ({batchers.DEFAULT})",
    )
    add(
        "--load-percent",
        type=counts,
        default=[],
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
    add(
        "--long-among-short",
        action="store_true",
        help="with --serve: short requests of --max-tokens at --rate (6), in turns alone and while "
        f"each of the engine's {SLOTS} slots has a generation of 3,500 tokens (--set "
        "workers.max_running_requests=N gives it more slots, not more long ones)",
    )
    add(
        "--beside-batch",
        action="store_true",
        help="with --serve: requests of --max-tokens at --rate (6), in turns alone and beside a "
        "batch that takes what they leave",
    )
    cost = "split CPU into µs per token and ms per request (last load)"
    add("--cost-model", action="store_true", help=cost)
    add(
        "--kill",
        action="store_true",
        help="what survives: kill -9 halfway through each run the busiest process that makes "
        "tokens, an engine core, or a replica where there is none, and account for every stream in "
        "flight",
    )
    add(
        "--idle",
        action="store_true",
        help="no load: the CPU of each kind of process, and the commands that Redis executes, over "
        "--rounds of --duration-s",
    )
    written = "write machine, versions, command and every row"
    add("--json", type=Path, dest="json_path", metavar="FILE", help=written)


def _contradiction(given: argparse.Namespace) -> str | None:
    """What does not go together, in words for the user."""
    systems = len(given.against) + given.serve + bool(given.url)
    kinds = (
        given.lateness,
        given.idle,
        given.kill,
        given.batching,
        given.long_among_short,
        given.beside_batch,
    )
    rules = {
        "--serve starts the service and --url names a running one: give only one of them": (
            given.serve and given.url
        ),
        "nothing to measure: give --url, --serve, --against or --lateness": not (
            systems or given.virtual or given.lateness
        ),
        "of --lateness, --idle, --kill, --batching, --long-among-short and --beside-batch give "
        "only one": sum(map(bool, kinds)) > 1,
        "--lateness starts what it measures, and nothing beside it": given.lateness and systems,
        "--idle and --kill need systems that this command starts": (
            (given.idle or given.kill) and given.url
        ),
        "--load-percent and --virtual need --batching": (
            (given.load_percent or given.virtual) and not given.batching
        ),
        "--batching compares batchers in front of one system: give one": (
            given.batching and systems + bool(given.virtual) != 1
        ),
        "--cost-model needs closed loops of requests that are alike": given.cost_model
        and (given.rate or given.batching or given.long_among_short or given.beside_batch),
        "--kill has no --cost-model": given.kill and given.cost_model,
        "--embeddings has no --batching, --kill, --long-among-short or --beside-batch": (
            given.embeddings
            and (given.batching or given.kill or given.long_among_short or given.beside_batch)
        ),
        "--batching has no --rate": given.batching and given.rate,
        "--long-among-short and --beside-batch need --serve, and nothing to compare with": (
            (given.long_among_short or given.beside_batch) and (not given.serve or given.against)
        ),
        "--set needs --serve: it is for the service that this command starts": (
            given.settings and not given.serve
        ),
    }
    return next((rule for rule, broken in rules.items() if broken), None)
