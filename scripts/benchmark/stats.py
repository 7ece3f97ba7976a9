"""Pure numbers: percentiles, medians of per-round ratios, arrival times, the two-shape cost
model.
"""

import math
import random
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of ``values`` lie, interpolated linearly; NaN when there
    are none.
    """
    if not values:
        return float("nan")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two in the middle; NaN when there are none."""
    return percentile(values, 50)


def round_ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """``ours / theirs`` round by round: noise that lasts longer than a round cancels out of each
    ratio.

    A round in which the other side measured nothing has no ratio and is left out.
    """
    return [
        own / other
        for own, other in zip(ours, theirs, strict=True)
        if other > 0 and not math.isnan(own)
    ]


def poisson_arrivals_s(rate_per_s: float, duration_s: float, seed: int) -> list[float]:
    """Arrival times in seconds from the start, as independent users cause them; equal for equal
    seeds.
    """
    if rate_per_s <= 0:
        raise ValueError(f"the rate must be above 0 requests/s, not {rate_per_s}")
    rng = random.Random(seed)
    arrivals_s: list[float] = []
    now_s = rng.expovariate(rate_per_s)
    while now_s < duration_s:
        arrivals_s.append(now_s)
        now_s += rng.expovariate(rate_per_s)
    return arrivals_s


def split_cost(
    short_tokens: float, short_cpu_s: float, long_tokens: float, long_cpu_s: float
) -> tuple[float, float]:
    """Fixed seconds per request and seconds per token, from the CPU of one request of each of two
    lengths.

    ``cpu = fixed + tokens * per_token`` is solved for the two shapes. Noise can make either
    slightly negative; it is left so, because clipping would hide how noisy the measurement was.
    """
    if long_tokens <= short_tokens:
        raise ValueError(
            f"the long shape ({long_tokens} tokens) must exceed the short one ({short_tokens})"
        )
    per_token_s = (long_cpu_s - short_cpu_s) / (long_tokens - short_tokens)
    return short_cpu_s - short_tokens * per_token_s, per_token_s
