"""`scripts/bench --batching`: batchers side by side in front of one engine, a real one or (with
`--virtual`) its model in virtual time. The runner is the same for both.
"""

import zlib
from argparse import Namespace
from collections.abc import Callable, Sequence

import uvloop

from scripts.simulation import virtual_time
from scripts.simulation.engine_model import EngineParameters, load_engine
from serve_app.errors import SettingsError

from . import report
from .batchers import Specification, mix, parse
from .measurement import Row, describe, maker_for, measure, take_turns, wanted_chars, warm_up
from .report import Column, median, names_of
from .run import (
    HttpEndpoint,
    Load,
    ModelEndpoint,
    Ran,
    RequestMaker,
    Run,
    SystemFailed,
    one_exchange,
    read_page,
)
from .systems import System

_CAPACITY_RUNS = 3
_SETTLE_TOKENS = 2
_SETTLE_TRIES = 100

COLUMNS = (
    Column("req/s", lambda row: row.requests_per_s, ",.1f"),
    Column("tok/s", lambda row: row.tokens_per_s, spread=True),
    Column("p50 ms", lambda row: row.end_to_end.p50_ms, least=True),
    Column("p99 ms", lambda row: row.end_to_end.p99_ms, least=True),
    Column("interactive p50", lambda row: row.interactive.p50_ms, least=True),
    Column("p99", lambda row: row.interactive.p99_ms, least=True),
    Column("in flight", lambda row: row.in_flight, ",.1f"),
    Column("slots used", lambda row: row.slots_used, ".0%"),
    Column("busy", lambda row: row.busy, ".0%"),
    Column("waiting", lambda row: row.waiting_p50),
    Column("preempted", lambda row: row.preempted, ".1%"),
    Column("KV", lambda row: row.kv_used, ".0%"),
    Column("RSS MiB", lambda row: row.rss_mib),
    Column("cores", lambda row: row.cores, ".2f"),
    Column("unfinished", lambda row: row.unfinished),
    Column("errors", lambda row: row.errors),
)
_LEGEND = """\
in flight: mean number of requests at the endpoint; slots used: the same per slot of the batcher;
busy: share of the time in which the engine had a request; waiting: in the engine, median;
preempted: by the engine, per request; KV: highest use of its KV cache; RSS, cores: memory and CPU
of the server's processes; ≥: some requests had not ended, and count with the time that they had
waited"""


Measure = Callable[[Specification, Load, int], Row]
"""Measures a batcher under a load in a round."""


def virtually(parameters: EngineParameters, prompt_tokens: int, max_tokens: int) -> Measure:
    """On a model: no noise, and the same every time for the same seed."""

    async def run(specification: Specification, load: Load) -> Ran:
        batcher = specification.make(load.users or None)
        jobs = mix(load.seed, max_tokens, prompt_tokens)
        return await Run(batcher, ModelEndpoint(parameters), load, jobs).measure()

    return lambda specification, load, number: describe(
        specification.name, number, virtual_time.run(run(specification, load))
    )


def really(options: Namespace, system: System, chars: int) -> Measure:
    """On a system."""
    page = system.page if read_page(system.page) else ""

    def maker(seed: str) -> RequestMaker:
        return maker_for(options, system, chars, zlib.crc32(seed.encode()))

    async def run(specification: Specification, load: Load, number: int) -> Row:
        batcher = specification.make(load.users or None)
        # The same lengths and arrivals for every batcher of a round, but no prompt twice: the
        # prefix cache would answer.
        own_maker = maker(f"{load.seed}/{specification.name}")
        jobs = mix(load.seed, options.max_tokens, options.prompt_tokens)
        one = Run(batcher, HttpEndpoint(own_maker, page), load, jobs)
        row = await measure(number, one, system, name=specification.name)
        if page and row.unfinished:
            await _settle(maker("settle"), page)
        return row

    return lambda specification, load, number: uvloop.run(run(specification, load, number))


async def _settle(maker: RequestMaker, page: str) -> None:
    """Return when the engine has dropped what was broken off; it must not cost the next run."""
    for _ in range(_SETTLE_TRIES):
        # An engine updates its page when it makes a step.
        await one_exchange(maker, _SETTLE_TOKENS)
        reading = read_page(page)
        if reading is None or reading.running + reading.waiting == 0:
            return
    raise SystemFailed("the engine goes on with requests that were broken off")


def compare_batchers(options: Namespace, arguments: Sequence[str], systems: list[System]) -> int:
    """Compare the batchers of ``options`` in front of the one system, or of a model without one;
    the command's exit status.
    """
    if not systems:
        try:
            parameters = load_engine(options.virtual)
        except SettingsError as wrong:
            raise SystemFailed(str(wrong)) from None
        measures = virtually(parameters, options.prompt_tokens, options.max_tokens)
    else:
        chars = wanted_chars(options, systems[0])
        warm_up(options, systems[0], chars, max(options.concurrency))
        measures = really(options, systems[0], chars)

    def load(label: str, users: int = 0, rate_per_s: float = 0.0) -> Load:
        """What is sent gets as long to end as the window was."""
        window_s, seed = options.duration_s, f"{options.seed}/{label}"
        return Load(users, rate_per_s, window_s, grace_s=window_s, seed=seed, label=label)

    print(report.heading(COLUMNS), flush=True)
    loads = [load(str(users), users) for users in options.concurrency]
    capacity_per_s = 0.0
    if options.load_percent:
        at_most = load("capacity", max(options.concurrency))
        capacity_per_s = _capacity_per_s(measures, at_most)
        loads = [
            load(f"{percent} %", rate_per_s=capacity_per_s * percent / 100)
            for percent in options.load_percent
        ]
    rows = take_turns(COLUMNS, loads, options.rounds, options.batching, measures)
    # Tokens/s of `continuous`, or without it of the last batcher, over those of each other.
    names = names_of(rows)
    ours = "continuous" if "continuous" in names else names[-1]
    pairs = [(ours, name) for name in names if name != ours]
    found = report.ratios(rows, pairs, {"tokens/s": lambda row: row.tokens_per_s})
    print(f"{_LEGEND}\n\n{report.summary(COLUMNS, rows)}")
    if found:
        print(f"\n{report.ratio_table(found)}")
    if capacity_per_s:
        print(f"\n100 %: {capacity_per_s:.1f} requests/s")
    report.write_document(
        options,
        ["scripts/bench", *arguments],
        capacity_requests_per_s=capacity_per_s or None,
        rows=rows,
        ratios=found,
    )
    return 1 if any(row.errors for row in rows) else 0


def _capacity_per_s(measures: Measure, load: Load) -> float:
    """Requests/s of the continuous batcher, of which ``--load-percent`` is a part."""
    runs = take_turns(COLUMNS, [load], _CAPACITY_RUNS, parse("continuous"), measures)
    found = median([row.requests_per_s for row in runs])
    if not found:
        raise SystemFailed(f"the system has no capacity: {runs[-1].error_kinds}")
    return found
