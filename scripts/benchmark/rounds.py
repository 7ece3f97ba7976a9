"""Who is measured when: the systems take turns at every load, so that noise meets all of them
alike.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from . import interrupts
from .errors import SystemFailed
from .load import Load, one_exchange
from .measurement import Row, measure
from .options import Options
from .prompts import RequestMaker, Shape
from .systems import System

# One token is no stream, and engines answer it on a path of its own; two are the shortest true
# stream.
SHORT_TOKENS = 2


@dataclass
class Turns:
    """All rows, in the order in which they were measured."""

    rows: list[Row]
    cost_rows: list[Row]


def take_turns(options: Options, systems: Sequence[System], report: Callable[[Row], None]) -> Turns:
    """Warm every system up, measure all loads in rounds, then (if asked) the two shapes of the cost
    model.
    """
    shape = wanted_shape(options, systems[0])
    for system in systems:
        warm_up(options, system, shape)
    turns = Turns([], [])
    for load in _loads(options):
        for number in range(1, options.rounds + 1):
            for system in systems:
                turns.rows.append(_measure(options, systems, system, load, shape, number))
                report(turns.rows[-1])
    if options.cost_model:
        # By time, also where the runs end by number: two tokens times that number would be over in
        # no time.
        load = replace(_loads(options)[-1], requests=0)
        for number in range(1, options.rounds + 1):
            for max_tokens in (SHORT_TOKENS, max(options.max_tokens, 2 * SHORT_TOKENS)):
                for system in systems:
                    one_shape = replace(shape, max_tokens=max_tokens)
                    turns.cost_rows.append(
                        _measure(options, systems, system, load, one_shape, number)
                    )
                    report(turns.cost_rows[-1])
    return turns


def _loads(options: Options) -> list[Load]:
    common = Load(
        requests=options.requests,
        duration_s=options.duration_s,
        timeout_s=options.timeout_s,
        seed=options.seed,
    )
    if options.rate_per_s:
        return [replace(common, rate_per_s=options.rate_per_s)]
    return [replace(common, concurrency=users) for users in options.concurrency]


def _measure(
    options: Options,
    systems: Sequence[System],
    system: System,
    load: Load,
    shape: Shape,
    number: int,
) -> Row:
    # Every system gets the same prompts in a round; no round repeats another's, or caches would
    # answer.
    seed = hash((options.seed, number, load.concurrency, shape.max_tokens)) & 0x7FFFFFFF
    others = [other.scope for other in systems if other is not system]
    maker = _maker(options, system, shape, seed)
    return interrupts.run(measure(system.name, maker, load, system.scope, others, number))


def _maker(options: Options, system: System, shape: Shape, seed: int) -> RequestMaker:
    return RequestMaker(system.url, options.api_key, replace(shape, model=system.model), seed)


def warm_up(options: Options, system: System, shape: Shape) -> None:
    """First requests pay for lazy imports, connections and kernels; nobody's row should."""
    users = 8 if options.rate_per_s else max(options.concurrency)
    maker = _maker(
        options, system, replace(shape, max_tokens=16), seed=random.Random().randrange(2**31)
    )
    load = Load(concurrency=users, requests=2 * users, timeout_s=options.timeout_s)
    row = interrupts.run(measure(system.name, maker, load, system.scope, [], 0))
    if row.errors == row.requests:
        raise SystemFailed(f"{system.name}: every request of the warm-up failed: {row.error_kinds}")


def wanted_shape(options: Options, system: System) -> Shape:
    """The run's shape, with the prompt's length in characters that makes the wanted number of
    tokens.
    """
    base = Shape(
        endpoint=options.endpoint,
        model=system.model,
        max_tokens=options.max_tokens,
        prompt_chars=0,
        stream=options.stream,
        ignore_eos=options.ignore_eos,
        sessions=options.sessions,
    )

    async def tokens_of(chars: int) -> int:
        maker = _maker(
            options, system, replace(base, prompt_chars=chars, max_tokens=2), seed=options.seed
        )
        return (await one_exchange(maker, options.timeout_s)).prompt_tokens

    async def both() -> tuple[int, int]:
        return await tokens_of(100), await tokens_of(300)

    few, many = interrupts.run(both())
    per_char = (many - few) / 200
    if per_char <= 0:
        # No usage in the answers: four characters a token is what English text has.
        return replace(base, prompt_chars=4 * options.prompt_tokens)
    template_tokens = few - 100 * per_char
    return replace(
        base, prompt_chars=max(1, round((options.prompt_tokens - template_tokens) / per_char))
    )
