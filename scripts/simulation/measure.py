"""Measures the points on a real engine: a running endpoint, or vLLM's own server started here."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

from scripts.benchmark import interrupts
from scripts.benchmark.client import RequestMaker, Shape
from scripts.benchmark.errors import SystemFailed
from scripts.benchmark.options import Options
from scripts.benchmark.options import parse as parse_bench
from scripts.benchmark.run import Load, Ran, one_exchange, put
from scripts.benchmark.stats import median
from scripts.benchmark.systems import System, existing, start_bare_vllm

from .points import FITTED, HELD_OUT, SESSIONS, Point, Times, median_point

LIMITS = {"max_num_seqs": 128, "max_num_batched_tokens": 2048, "max_model_len": 4096}
_ENGINE = '{"dtype": "float32", "enforce_eager": true, "max_num_seqs": 128, \
"max_num_batched_tokens": 2048, "max_model_len": 4096}'
# Words of a prompt, output tokens, and whether prompts share their first half by session.
_SHAPES = {"short": (64, 64, False), "long": (600, 32, False), "prefix": (600, 32, True)}


@contextmanager
def engine(url: str, model: str) -> Iterator[tuple[Options, System]]:
    """The engine to measure; one that is started here is ended, too."""
    words = ["--url", url, "--model", model] if url else ["--against", "bare-vllm"]
    options = parse_bench([*words, "--engine-args", _ENGINE])
    with tempfile.TemporaryDirectory(prefix="fit-", ignore_cleanup_errors=True) as folder:
        system = existing(options) if url else start_bare_vllm(options, Path(folder))
        try:
            yield options, system
        finally:
            system.end()


def kv_limits(system: System) -> dict[str, int]:
    """How many blocks the engine has and of what size, as its metrics say."""
    page = system.url.removesuffix("/v1") + "/metrics"
    with urlopen(page, timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("vllm:cache_config_info"):
                names = ("num_gpu_blocks", "block_size")
                return {name: int(line.split(f'{name}="')[1].split('"')[0]) for name in names}
    raise SystemFailed(f"{page} has no vllm:cache_config_info")


def measure(options: Options, system: System, duration_s: float, rounds: int) -> list[Point]:
    """All points, one after another, in each of the rounds; the medians of the rounds. What else
    the machine does for a moment then spoils one round of a point, and not the point.
    """
    found: dict[tuple[str, int], list[Point]] = {}
    shapes = {name: _shape(options, system, *words) for name, words in _SHAPES.items()}
    for one_round in range(rounds):
        for number, (name, shape) in enumerate(shapes.items()):
            # No seed comes twice, or the prefix cache would answer.
            seed = 1000 * (len(shapes) * one_round + number)
            # First requests pay for lazy imports and connections.
            warm = put(_maker(options, system, shape, seed), Load(8, window_s=None), requests=16)
            interrupts.run(warm)
            for users in sorted((*FITTED, *HELD_OUT)):
                maker = _maker(options, system, shape, seed + users)
                load = Load(users, window_s=duration_s, least=2 * users)
                result = interrupts.run(put(maker, load))
                point = _point(name, users, shape, result, shared=_SHAPES[name][2])
                found.setdefault((name, users), []).append(point)
                print(f"{name} {users}: {point.measured}", file=sys.stderr, flush=True)
    return [median_point(points) for points in found.values()]


def _maker(options: Options, system: System, shape: Shape, seed: int) -> RequestMaker:
    return RequestMaker(system.url, options.api_key, shape, seed)


def _shape(
    options: Options, system: System, prompt_tokens: int, output_tokens: int, shared: bool
) -> Shape:
    """The prompt's length in characters that makes the wanted number of tokens."""
    base = Shape(system.model, output_tokens, 200, sessions=SESSIONS if shared else 0)

    async def tokens_of(chars: int) -> int:
        maker = _maker(options, system, replace(base, prompt_chars=chars, max_tokens=2), 0)
        return (await one_exchange(maker)).prompt_tokens

    few, many = interrupts.run(tokens_of(200)), interrupts.run(tokens_of(600))
    per_char = (many - few) / 400
    return replace(base, prompt_chars=round(200 + (prompt_tokens - few) / per_char))


def _point(name: str, users: int, shape: Shape, result: Ran, shared: bool) -> Point:
    good = [one for one in result.exchanges if one.error is None and one.tokens > 1]
    if len(good) < len(result.exchanges):
        failed = next(one.error for one in result.exchanges if one not in good)
        raise SystemFailed(f"{name} with {users} users: {failed}")
    ttft = [(one.first_token_s or 0.0) - one.started_s for one in good]
    each = [
        ((one.last_token_s or 0.0) - (one.first_token_s or 0.0)) / (one.tokens - 1) for one in good
    ]
    events = sum(one.events for one in good)
    rate = result.window_events / result.window_s * sum(one.tokens for one in good) / events
    prompt_tokens = round(median([one.prompt_tokens for one in good]))
    times = Times(median(ttft) * 1e3, median(each) * 1e3, rate)
    half = prompt_tokens // 2 if shared else 0
    return Point(name, users, prompt_tokens, shape.max_tokens, half, times)
