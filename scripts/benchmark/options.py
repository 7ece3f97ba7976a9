"""What the user asked for, checked."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .arguments import make_parser
from .batching.specification import Specification
from .order.arguments import ROUNDS
from .sse import Endpoint


@dataclass(frozen=True)
class Options:
    """Every option, with its default where none was given; units are in the names."""

    url: str
    serve: bool
    name: str
    against: tuple[str, ...]
    rounds: int
    model: str
    model_path: str
    engine_args: dict[str, object]
    api_key: str
    ready_timeout_s: float
    concurrency: tuple[int, ...]
    rate_per_s: float
    requests: int
    duration_s: float
    endpoint: Endpoint
    stream: bool
    max_tokens: int
    prompt_tokens: int
    ignore_eos: bool
    sessions: int
    seed: int
    timeout_s: float
    root_pids: tuple[int, ...]
    match: tuple[str, ...]
    batching: tuple[Specification, ...]
    load_percent: tuple[int, ...]
    virtual: str
    order: str
    settings: tuple[str, ...]
    slots: int
    long_tokens: int
    metrics_url: str
    settle_s: float
    cost_model: bool
    json_path: Path | None
    plot_path: Path | None


def parse(arguments: Sequence[str]) -> Options:
    """Options from the command line; ends the process with a message when they make no sense."""
    parser = make_parser()
    given = vars(parser.parse_args(arguments))
    if given["serve"] and given["url"]:
        parser.error(
            "--serve starts the service and --url names a running one: give only one of them"
        )
    if not (_systems(given) or given["virtual"]):
        parser.error("nothing to measure: give --url, --serve or --against")
    if given["cost_model"] and (given["rate_per_s"] or not given["stream"]):
        parser.error("--cost-model needs streams in a closed loop")
    if given["batching"]:
        _check_batching(parser, given)
    elif given["load_percent"] or given["virtual"]:
        parser.error(
            f"{'--load-percent' if given['load_percent'] else '--virtual'} needs --batching"
        )
    if given["order"]:
        _check_order(parser, given)
    if given["settings"] and not given["serve"]:
        parser.error("--set needs --serve: it is for the service that this command starts")
    given["rounds"] = given["rounds"] or (3 if given["against"] else 1)
    for name in ("against", "root_pids", "match", "settings"):
        given[name] = tuple(dict.fromkeys(given[name]))
    return Options(**given)


def _check_batching(parser: argparse.ArgumentParser, given: dict[str, Any]) -> None:
    if _systems(given) + bool(given["virtual"]) != 1:
        parser.error("--batching compares batchers in front of one system: give one")
    for name, value in (("--rate", "rate_per_s"), ("--requests", "requests")):
        if given[value]:
            parser.error(f"--batching has no {name}: its load is --concurrency or --load-percent")
    if given["cost_model"]:
        parser.error("--batching has no --cost-model")
    if not (given["stream"] and given["ignore_eos"]):
        parser.error("--batching needs streams of a known length")


def _check_order(parser: argparse.ArgumentParser, given: dict[str, Any]) -> None:
    if _systems(given) != 1:
        parser.error("--order measures one system: give one")
    if given["batching"] or given["cost_model"] or given["requests"] or given["plot_path"]:
        parser.error("--order has no --batching, --cost-model, --requests or --plot")
    if not (given["stream"] and given["ignore_eos"]) or given["endpoint"] == "responses":
        parser.error("--order needs streams of a known length, of chat or completions")
    given["rounds"] = given["rounds"] or ROUNDS
    if given["order"] == "long-among-short":
        # First, so that one who sets it, too, gets slots that the long ones leave free.
        given["settings"].insert(0, f"workers.max_running_requests={given['slots']}")


def _systems(given: dict[str, Any]) -> int:
    return len(given["against"]) + bool(given["serve"]) + bool(given["url"])
