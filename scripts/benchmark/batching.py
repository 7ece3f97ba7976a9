"""`scripts/bench --batching`: batchers side by side in front of one engine, a real one or (with
`--virtual`) its model in virtual time. The runner is the same for both.
"""

import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace

from scripts.simulation import virtual_time
from scripts.simulation.engines import EngineParameters, load_engine
from serve_app.errors import SettingsError

from . import interrupts, tables
from .batchers import Specification, mix, parse
from .client import RequestMaker, Shape
from .engine_page import EnginePage
from .errors import SystemFailed
from .measurement import Row, describe, maker_for, measure, wanted_shape, warm_up
from .options import Options
from .report import write_document
from .run import HttpEndpoint, Load, ModelEndpoint, Ran, Run, one_exchange
from .stats import Ratio, loads_of, median, names_of, ratio, spread
from .systems import System
from .tables import Column

_CAPACITY_RUNS = 3
_SETTLE_TOKENS = 2
_SETTLE_TRIES = 100
_CLOSED = ("static", "dynamic")
_FIXED = ("async",)
_MIXED = ("hybrid", "split")


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
    Column("KV", lambda row: row.kv_used, ".0%"),
    Column("RSS MiB", lambda row: row.rss_mib),
    Column("cores", lambda row: row.cores, ".2f"),
    Column("unfinished", lambda row: row.unfinished),
    Column("errors", lambda row: row.errors),
)
_LEGEND = """\
in flight: mean number of requests at the endpoint; slots used: the same per slot of the batcher;
busy: share of the time in which the engine had a request; KV: highest use of its KV cache;
RSS, cores: memory and CPU of the server's processes; ≥: some requests had not ended, and count with
the time that they had waited"""


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


def really(options: Options, system: System, shape: Shape) -> Measure:
    """On a system."""
    page: EnginePage | None = None
    with suppress(SystemFailed):
        page = EnginePage(system.pages)

    def maker(seed: str, max_tokens: int) -> RequestMaker:
        one_shape = replace(shape, max_tokens=max_tokens)
        return maker_for(options, system, one_shape, zlib.crc32(seed.encode()))

    async def run(specification: Specification, load: Load, number: int) -> Row:
        batcher = specification.make(load.users or None)
        # The same lengths and arrivals for every batcher of a round, but no prompt twice: the
        # prefix cache would answer.
        own_maker = maker(f"{load.seed}/{specification.name}", options.max_tokens)
        jobs = mix(load.seed, options.max_tokens, options.prompt_tokens)
        one = Run(batcher, HttpEndpoint(own_maker, page), load, jobs)
        row = await measure(specification.name, number, one, system.scope)
        if page is not None and row.unfinished:
            await _settle(maker("settle", _SETTLE_TOKENS), page)
        return row

    return lambda specification, load, number: interrupts.run(run(specification, load, number))


async def _settle(maker: RequestMaker, page: EnginePage) -> None:
    """Return when the engine has dropped what was broken off; it must not cost the next run."""
    for _ in range(_SETTLE_TRIES):
        # An engine updates its page when it makes a step.
        await one_exchange(maker)
        reading = await page.read()
        if reading is None or reading.running + reading.waiting == 0:
            return
    raise SystemFailed("the engine goes on with requests that were broken off")


def compare_batchers(options: Options, arguments: Sequence[str], system: System | None) -> int:
    """Compare the batchers of ``options`` in front of ``system``, or of a model without one; the
    command's exit status.
    """
    if system is None:
        try:
            parameters = load_engine(options.virtual)
        except SettingsError as wrong:
            raise SystemFailed(str(wrong)) from None
        measures = virtually(parameters, options.prompt_tokens, options.max_tokens)
    else:
        shape = wanted_shape(options, system)
        warm_up(options, system, shape, max(options.concurrency))
        measures = really(options, system, shape)
    print(tables.heading(COLUMNS), flush=True)
    capacity_per_s = _capacity_per_s(options, measures) if options.load_percent else 0.0
    rows = _take_turns(options, measures, capacity_per_s)
    print(f"{_LEGEND}\n\n{tables.summary(COLUMNS, rows)}")
    if found_ratios := ratios(rows):
        print(f"\n{tables.ratios(found_ratios)}")
    if capacity_per_s:
        print(f"\n100 %: {capacity_per_s:.1f} requests/s")
    found = {
        "capacity_requests_per_s": capacity_per_s or None,
        "batch_rows": [asdict(row) for row in rows],
        "batch_ratios": [asdict(one) for one in found_ratios],
    }
    write_document(options.json_path, arguments, found)
    return 1 if any(row.errors for row in rows) else 0


def _take_turns(options: Options, measures: Measure, capacity_per_s: float) -> list[Row]:
    """For every load in every round one run of every batcher, so that noise meets all alike."""
    loads = [_load(options, str(users), users) for users in options.concurrency]
    if capacity_per_s:
        loads = [
            _load(options, f"{percent} %", rate_per_s=capacity_per_s * percent / 100)
            for percent in options.load_percent
        ]
    rows: list[Row] = []
    for load in loads:
        for number in range(1, options.rounds + 1):
            seeded = replace(load, seed=f"{load.seed}/{number}")
            for specification in options.batching:
                rows.append(measures(specification, seeded, number))
                print(tables.line(COLUMNS, rows[-1]), flush=True)
    return rows


def _load(options: Options, label: str, users: int = 0, rate_per_s: float = 0.0) -> Load:
    """What is sent gets as long to end as the window was."""
    window_s, seed = options.duration_s, f"{options.seed}/{label}"
    return Load(users, rate_per_s, window_s, grace_s=window_s, seed=seed, label=label)


def _capacity_per_s(options: Options, measures: Measure) -> float:
    """Requests/s of the continuous batcher, of which ``--load-percent`` is a part."""
    (continuous,) = parse("continuous")
    load = _load(options, "capacity", max(options.concurrency))
    runs = [
        measures(continuous, replace(load, seed=f"{load.seed}/{number}"), number)
        for number in range(1, _CAPACITY_RUNS + 1)
    ]
    found = median([row.requests_per_s for row in runs])
    if not found:
        raise SystemFailed(f"the system has no capacity: {runs[-1].error_kinds}")
    return found


def ratios(rows: Sequence[Row]) -> list[Ratio]:
    """Continuous against each, tuned against the best fixed window, hybrid and split against the
    better of closed batches and fixed windows, and split against the better of its two parts; at
    every load.
    """
    names = names_of(rows)
    found: list[Ratio | None] = []
    for load in loads_of(rows):
        pairs = [("continuous", name) for name in names if name != "continuous"]
        pairs += [("tuned", best) for best in _best(rows, load, _FIXED, names)]
        mixed = [name for name in names if _kind(name) in _MIXED]
        either = (*_CLOSED, *_FIXED)
        pairs += [(ours, best) for ours in mixed for best in _best(rows, load, either, names)]
        pairs += [
            (ours, best) for ours in names for best in _best(rows, load, either, _parts(ours))
        ]
        tokens_per_s = ("tokens/s", lambda row: row.tokens_per_s)
        found += [
            ratio(rows, load, *pair, tokens_per_s)
            for pair in dict.fromkeys(pairs)
            if pair[0] in names
        ]
    return [one for one in found if one is not None]


def _best(rows: Sequence[Row], load: str, kinds: Sequence[str], among: Sequence[str]) -> list[str]:
    """The name of the batcher of these kinds ``among`` some with the highest median; empty if there
    is none.
    """
    names = [name for name in names_of(rows) if _kind(name) in kinds and name in among]
    names.sort(key=lambda name: spread(rows, name, load, lambda row: row.tokens_per_s).median)
    return names[-1:]


def _parts(name: str) -> list[str]:
    """What a split batcher is made of; nothing for others."""
    kind, _, numbers = name.partition(":")
    window, _, batches = numbers.partition("/")
    return [f"async:{window}", f"dynamic:{batches}"] if kind == "split" else []


def _kind(name: str) -> str:
    return name.partition(":")[0]
