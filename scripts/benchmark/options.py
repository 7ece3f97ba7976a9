"""What the user asked for, checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .arguments import make_parser
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
    cost_model: bool
    json_path: Path | None
    plot_path: Path | None


def parse(arguments: Sequence[str]) -> Options:
    """Options from the command line; ends the process with a message when they make no sense."""
    parser = make_parser()
    given = vars(parser.parse_args(arguments))
    if given["serve"] and given["url"]:
        parser.error("--serve starts the service and --url names one that runs: give one of them")
    if not (given["serve"] or given["url"] or given["against"]):
        parser.error("nothing to measure: give --url, --serve or --against")
    if given["cost_model"] and (given["rate_per_s"] or not given["stream"]):
        parser.error("--cost-model needs streams in a closed loop")
    given["rounds"] = given["rounds"] or (3 if given["against"] else 1)
    for name in ("against", "root_pids", "match"):
        given[name] = tuple(dict.fromkeys(given[name]))
    return Options(**given)
