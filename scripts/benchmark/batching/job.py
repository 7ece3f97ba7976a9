"""One request as a batcher sees it, and the seeded mix of requests that every batcher gets."""

import math
import random
from collections.abc import Iterator
from typing import NamedTuple

INTERACTIVE_SHARE = 0.7
_SHORTEST_PART = 16


class Job(NamedTuple):
    """One request that waits for a batcher, or runs at the engine."""

    number: int
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    interactive: bool

    @property
    def tokens(self) -> int:
        """What the request adds to the tokens of a batch."""
        return self.prompt_tokens + self.output_tokens


class Demand(NamedTuple):
    """What a request asks for, before it has arrived anywhere."""

    output_tokens: int
    interactive: bool


def mix(seed: str, longest_tokens: int) -> Iterator[Demand]:
    """Requests without end, equal for equal seeds.

    Output lengths are log-uniform from a sixteenth of ``longest_tokens`` to all of it: half of the
    requests are shorter than a quarter. 70 % are interactive, whatever their length.
    """
    rng = random.Random(seed)
    shortest_tokens = max(1, longest_tokens // _SHORTEST_PART)
    low, high = math.log(shortest_tokens), math.log(longest_tokens)
    while True:
        tokens = round(math.exp(rng.uniform(low, high)))
        yield Demand(tokens, rng.random() < INTERACTIVE_SHARE)
