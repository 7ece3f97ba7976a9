"""The command line: every option with its help, once, and which of them make sense together."""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .batchers import ABOUT as ABOUT_BATCHERS
from .batchers import DEFAULT, Specification
from .batchers import parse as parse_batchers

PEERS = ("bare-vllm", "ray-serve-llm", "ray-direct")
ORDERS = ("backlog", "long-among-short")
TINY_MODEL = str(Path(__file__).resolve().parents[2] / "workers/tiny_model")
SLOTS = 4
"""With long-among-short: requests that the engine runs at a time."""
_MANY_ROUNDS = 7
_PEER_ROUNDS = 3
_ENGINE_ARGS = json.dumps({"dtype": "float32", "enforce_eager": True, "max_model_len": 4096})

_USAGE = "scripts/bench [--url URL | --serve] [--against PEER …] [options]"
_ABOUT = """\
Load on OpenAI endpoints, and an honest account of what it cost: throughput, latencies, errors and
CPU by kind of process. Against peers the runs alternate (A B C A B C …) and the ratios are taken
round by round, so that they hold on a noisy machine. Whatever this command starts, it ends."""

_ABOUT_ORDER = """\
the order of work (--order): one system, the real engine, rounds on a service that keeps running.
  backlog                   as many users as the largest --concurrency, which should be more than
                            the engine can hold, with the output lengths of --batching. The engine's
                            own metrics page is read five times a second: how many requests wait in
                            the engine, how many it has preempted, how much of its KV cache is used
  long-among-short          short requests of --max-tokens at --rate (6), in turns alone and
                            beside a generation of 3,500 tokens in each of the engine's four slots,
                            which have all begun before the first short request is sent. The texts
                            of the long ones are compared with those that the same prompts gave
                            before, with nothing beside them
  --set makes the engine small, so that its KV cache is what bounds it:
    scripts/bench --serve --order backlog --concurrency 160 --max-tokens 512 \\
      --set engine.args.max_model_len=1024 --set engine.args.num_gpu_blocks_override=64
  long-among-short sets workers.max_running_requests to 4; with --set to more than that, it tells
  what the long ones cost the short ones where nobody waits for a slot."""

_EPILOG = f"""\
examples:
  a service that runs already:
    scripts/bench --url http://127.0.0.1:8000/v1
  the same under 20 arrivals a second for half a minute:
    scripts/bench --url http://127.0.0.1:8000/v1 --rate 20 --duration-s 30
  start everything, compare three systems, keep the figures:
    scripts/bench --serve --against bare-vllm --against ray-serve-llm --json out.json
  what a token and a request cost, by kind of process:
    scripts/bench --serve --concurrency 32 --cost-model
  what the queue and the journal cost, on the simulated engine: beside Ray Serve alone:
    scripts/bench --serve --against ray-direct --replicas 2 --max-tokens 64 --cost-model
  what a change of the code changes, without load:
    scripts/bench --micro --concurrency 8,64
  a peer alone:
    scripts/bench --against bare-vllm --concurrency 1,8
  batchers side by side, in front of the engine alone, and in virtual time:
    scripts/bench --against bare-vllm --batching --rounds 7 --max-tokens 64 --duration-s 2
    scripts/bench --virtual --batching --rounds 7 --max-tokens 64

{ABOUT_BATCHERS}

{_ABOUT_ORDER}

how to read the figures:
  Throughput counts the tokens of the time in which load was kept up (at least one response for
  every user); the tail after it counts for latency and CPU only. TTFT runs from sending (with
  --rate: from the scheduled arrival) to the first event of a token. Gaps are between reads of the
  socket: what a server sends in one piece has gaps of 0. CPU is user and system time from /proc of
  a system's processes, without the load generator, whose share stands beside it.
  A stream without its last event, a status other than 200 or a response with too few tokens is an
  error.

exit status: 0; 1 when a request failed; 2 when a system did not start; 130 when interrupted."""


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _batchers(text: str) -> tuple[Specification, ...]:
    try:
        return parse_batchers(text)
    except ValueError as unknown:
        raise argparse.ArgumentTypeError(str(unknown)) from None


def _option(default: Any, text: str, flag: str = "", group: str = "", **words: Any) -> Any:
    """A field of `Options`; ``group`` is the heading that begins with it in the help."""
    about = {"default": default, "help": text, **words}
    return field(default=default, metadata={"flag": flag, "group": group, "words": about})


@dataclass(frozen=True)
class Options:
    """Every option, with its default where none was given; units are in the names."""

    url: str = _option(
        "", "a running OpenAI endpoint (http://127.0.0.1:8000/v1)", group="what to measure"
    )
    serve: bool = _option(False, "start this repository's service", action="store_true")
    replicas: int = _option(
        1, "with --serve and ray-direct: replicas of each kind (%(default)s)", type=_positive
    )
    against: tuple[str, ...] = _option(
        (), f"start it too: {', '.join(PEERS)}", action="append", choices=PEERS, metavar="PEER"
    )
    micro: bool = _option(
        False,
        "the CPU time of a token in the service's own code: worker and ingress in this process, "
        "without Ray, sockets and HAProxy",
        action="store_true",
    )
    rounds: int = _option(
        0, "runs of every system and load (3 with peers, 7 with --micro, else 1)", type=_positive
    )
    model: str = _option("", "the model's name at the endpoint (the first that it lists)")
    model_path: str = _option(TINY_MODEL, "the weights to serve (workers/tiny_model)")
    engine_args: dict[str, object] = _option(  # noqa: RUF009
        _ENGINE_ARGS, "engine options of the peers, as JSON (%(default)s)", type=json.loads
    )
    api_key: str = _option(os.environ.get("OPENAI_API_KEY", "none"), "($OPENAI_API_KEY)")
    ready_timeout_s: float = _option(
        300.0, "time limit for each system's start (%(default)s)", type=float
    )
    root_pids: tuple[int, ...] = _option(
        (),
        "with --url: count this process and its descendants; may be repeated",
        "--root-pid",
        action="append",
        type=int,
    )
    match: tuple[str, ...] = _option(
        (),
        "with --url: count processes with this in their arguments or environment, such as the "
        "state directory",
        action="append",
    )

    concurrency: tuple[int, ...] = _option(
        (1, 8, 32, 128),
        "closed loops of N users (1,8,32,128)",
        group="the load",
        type=_counts,
        metavar="N,N",
    )
    rate_per_s: float = _option(0.0, "open loop: Poisson arrivals/s", "--rate", type=float)
    duration_s: float = _option(10.0, "minimum length of each run (%(default)s)", type=float)
    max_tokens: int = _option(128, "output tokens per response (%(default)s)", type=_positive)
    prompt_tokens: int = _option(64, "approximate prompt length (%(default)s)", type=_positive)
    seed: int = _option(0, "seed of prompts and arrivals (%(default)s)", type=int)

    batching: tuple[Specification, ...] = _option(
        (),
        f"compare batchers in front of one system ({DEFAULT})",
        group="batchers side by side",
        type=_batchers,
        nargs="?",
        const=_batchers(DEFAULT),
        metavar="B,B",
    )
    load_percent: tuple[int, ...] = _option(
        (),
        "with --batching: open loops at P %% of the capacity, which is measured first at the "
        "highest --concurrency, instead of closed loops",
        type=_counts,
        metavar="P,P",
    )
    virtual: str = _option(
        "",
        "with --batching, in place of a system: the model of an engine in virtual time, as "
        "scripts/simulate has it (tiny-cpu)",
        nargs="?",
        const="tiny-cpu",
        metavar="ENGINE",
    )

    order: str = _option(
        "", " | ".join(ORDERS), group="the order of work", choices=ORDERS, metavar="WHAT"
    )
    settings: tuple[str, ...] = _option(
        (),
        "with --serve: a setting of the service, such as engine.args.max_model_len=1024; may be "
        "repeated",
        "--set",
        action="append",
        metavar="NAME=VALUE",
    )

    cost_model: bool = _option(
        False,
        "split CPU into µs per token and ms per request (last load)",
        group="output",
        action="store_true",
    )
    json_path: Path | None = _option(  # noqa: RUF009
        None, "write machine, versions, command and every row", "--json", type=Path, metavar="FILE"
    )


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
    group = parser.add_argument_group()
    for one in fields(Options):
        if one.metadata["group"]:
            group = parser.add_argument_group(one.metadata["group"])
        words = dict(one.metadata["words"])
        if words.get("action") == "append":
            words["default"] = []  # argparse appends to it
        flag = one.metadata["flag"] or f"--{one.name.replace('_', '-')}"
        if words.get("action") != "store_true":
            words.setdefault("metavar", flag.rpartition("-")[2].upper())
        group.add_argument(flag, dest=one.name, **words)
    return parser


def parse(arguments: Sequence[str]) -> Options:
    """Options from the command line; ends the process with a message when they make no sense."""
    parser = make_parser()
    given = vars(parser.parse_args(arguments))
    if wrong := _contradiction(given):
        parser.error(wrong)
    if given["order"] == "long-among-short":
        # First, so that one who sets it, too, gets slots that the long ones leave free.
        given["settings"].insert(0, f"workers.max_running_requests={SLOTS}")
    peers = _PEER_ROUNDS if given["against"] else 1
    repeated = given["order"] or given["micro"]
    given["rounds"] = given["rounds"] or (_MANY_ROUNDS if repeated else peers)
    for name in ("against", "root_pids", "match", "settings"):
        given[name] = tuple(dict.fromkeys(given[name]))
    return Options(**given)


def _contradiction(given: dict[str, Any]) -> str | None:
    """What does not go together, in words for the user."""
    systems = len(given["against"]) + bool(given["serve"]) + bool(given["url"])
    batching, virtual, order = (given[name] for name in ("batching", "virtual", "order"))
    rules = {
        "--serve starts the service and --url names a running one: give only one of them": (
            given["serve"] and given["url"]
        ),
        "nothing to measure: give --url, --serve, --against or --micro": not (
            systems or virtual or given["micro"]
        ),
        "--micro starts what it measures, and nothing beside it": given["micro"] and systems,
        "--cost-model needs a closed loop": given["cost_model"] and given["rate_per_s"],
        "--load-percent needs --batching": given["load_percent"] and not batching,
        "--virtual needs --batching": virtual and not batching,
        "--batching compares batchers in front of one system: give one": (
            batching and systems + bool(virtual) != 1
        ),
        "--batching has no --rate: its load is --concurrency or --load-percent": (
            batching and given["rate_per_s"]
        ),
        "--batching has no --cost-model": batching and given["cost_model"],
        "--order measures one system: give one": order and systems != 1,
        "--order has no --batching or --cost-model": (order and (batching or given["cost_model"])),
        "--set needs --serve: it is for the service that this command starts": (
            given["settings"] and not given["serve"]
        ),
    }
    return next((rule for rule, broken in rules.items() if broken), None)
