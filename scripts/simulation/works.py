"""The work that `--work` names: a trace, or arrivals drawn by a seed."""

import random
from argparse import Namespace
from collections.abc import Iterator

from . import traces
from .presets import SLOS, Plan, capacity_per_s, speed_for
from .service import Cluster
from .traces import Cast
from .work import Work
from .workloads import (
    Lengths,
    Source,
    Talk,
    bursts,
    closed_loop,
    conversations,
    open_loop,
    schedule,
)

WORKS = (
    *traces.TIMED,
    "poisson",
    "bursts",
    "closed-loop",
    "sessions",
)


def plan(options: Namespace, cluster: Cluster, seed: int) -> Plan:
    """The work on a cluster.

    Raises:
        SettingsError: the file of the trace is absent.
    """
    return Plan(cluster, [_source(options, cluster, seed)], options.until_s, SLOS)


def _source(options: Namespace, cluster: Cluster, seed: int) -> Source:
    cast = Cast(seed, options.tenants)
    name = options.work
    if name in traces.TIMED:
        return _timed(list(traces.TIMED[name](cast, cluster.engine.block_size)), options, cluster)
    return _drawn(name, options, cluster, cast)


def _drawn(name: str, options: Namespace, cluster: Cluster, cast: Cast) -> Source:
    seed = str(cast.seed)
    prompt, output = Lengths(options.prompt_tokens), Lengths(options.output_tokens)

    def make(rng: random.Random) -> Work:
        tenant, request_class = cast.draw(rng.random())
        return Work(prompt.draw(rng), output.draw(rng), tenant=tenant, request_class=request_class)

    if name == "closed-loop":
        users = options.users or 2 * cluster.slots
        return closed_loop(users, make, options.duration_s, seed, options.think_s)
    rate_per_s = options.rate_per_s
    if not rate_per_s:
        rate_per_s = (options.load or 0.8) * capacity_per_s(cluster, make)
    if name == "sessions":
        think_s, most = options.think_s or 10.0, cluster.engine.longest() - 64
        talk = Talk(Lengths(5, 1.6), prompt, output, think_s, most, tenants=options.tenants)
        return conversations(bursts(rate_per_s / 5, 1, options.duration_s, seed), talk, seed)
    cv = 1.0 if name == "poisson" else options.cv
    return open_loop(bursts(rate_per_s, cv, options.duration_s, seed), make, seed)


def _timed(found: list[tuple[float, Work]], options: Namespace, cluster: Cluster) -> Source:
    """As fast as `--speed` or `--load` says."""
    found = found[: options.requests or None]
    speed = options.speed
    if options.load:
        speed = speed_for(found, cluster, options.load)

    def faster() -> Iterator[tuple[float, Work]]:
        return ((at_s / speed, work) for at_s, work in found)

    return schedule(faster)
