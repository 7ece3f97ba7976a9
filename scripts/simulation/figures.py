"""What came of a simulation, in figures: of all requests, of each class and of each tenant; and the
table that shows them.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from scripts.benchmark.report import markdown, percentile
from serve_app.policy.classes import CLASSES

from .service import Outcome
from .work import Record

_TENANTS = 8
"""Of more tenants, the ones with the most tokens are shown."""
_COLUMNS = ("", "requests", "answered", "refused", "expired", "tokens", "share")
_TIMES = ("wait s", "TTFT s", "token ms", "whole s")
Pair = tuple[float, float]
"""p50 and p99."""


@dataclass(frozen=True)
class Slo:
    """What a request must keep to count as good: both times."""

    ttft_s: float
    per_token_s: float


SLOS = {"realtime": Slo(1.0, 0.05), "standard": Slo(3.0, 0.1), "batch": Slo(120.0, 1.0)}


@dataclass(frozen=True)
class Group:
    """The figures of some of the requests. Times are of requests that were answered."""

    name: str
    requests: int
    answered: int
    refused: int
    expired: int
    open: int
    """Neither answered nor refused nor expired when the simulation stopped."""
    tokens: int
    share: float
    """Of all generated tokens."""
    wait_s: Pair
    ttft_s: Pair
    per_token_ms: Pair
    whole_s: Pair
    good: float
    """Share of the requests that arrived and kept their SLO; NaN without one."""


@dataclass(frozen=True)
class Figures:
    """A simulation in figures."""

    policy: str
    seed: int
    simulated_s: float
    wall_s: float
    groups: list[Group]
    tokens_per_s: float
    slots_used: float
    """Mean share of the slots over the time of the simulation."""
    idle_slot_s: float
    """Time for which slots were free while requests waited, summed over the slots."""
    kv_used_max: float
    preemptions: int
    cached: float
    """The part of the prompts' tokens that prefix caches held."""
    claims: int


def figures(outcome: Outcome, seed: int) -> Figures:
    records = outcome.records
    served: Counter[str] = Counter()
    for record in records:
        served[record.work.tenant] += record.tokens
    total = served.total() or 1
    parts = [("all", records)]
    parts += [(c, [one for one in records if one.work.request_class == c]) for c in CLASSES]
    if len(served) > 1:
        names = sorted(name for name, _ in served.most_common(_TENANTS))
        parts += [(name, [one for one in records if one.work.tenant == name]) for name in names]
    end_s = outcome.end_s or 1e-9
    busy_s, idle_s = slot_times(outcome)
    engines = outcome.engines
    queries = sum(one.queries for one in engines)
    return Figures(
        outcome.policy,
        seed,
        outcome.end_s,
        outcome.wall_s,
        [_group(name, some, total) for name, some in parts if some],
        total / end_s,
        busy_s / end_s / outcome.cluster.slots,
        idle_s,
        max((sample[1] for one in engines for sample in one.samples), default=0.0),
        sum(one.preemptions for one in engines),
        sum(one.hits for one in engines) / (queries or 1),
        outcome.round_trips,
    )


def _group(name: str, records: Sequence[Record], total: int) -> Group:
    answered = [record for record in records if record.answered]

    def times(measure: Callable[[Record], float], scale: float = 1.0) -> Pair:
        values = [measure(record) * scale for record in answered]
        return percentile(values, 50), percentile(values, 99)

    tokens = sum(record.tokens for record in records)
    judged = [record for record in records if record.work.request_class in SLOS]
    good = sum(map(_is_good, judged))
    refused = sum(record.refused for record in records)
    expired = sum(record.expired for record in records)
    return Group(
        name,
        len(records),
        len(answered),
        refused,
        expired,
        len(records) - len(answered) - refused - expired,
        tokens,
        tokens / total,
        times(lambda one: one.wait_s),
        times(lambda one: one.ttft_s),
        times(lambda one: one.per_token_s, 1e3),
        times(lambda one: one.whole_s),
        good / len(judged) if judged else math.nan,
    )


def _is_good(record: Record) -> bool:
    slo = SLOS[record.work.request_class]
    return record.answered and record.ttft_s <= slo.ttft_s and record.per_token_s <= slo.per_token_s


def slot_times(outcome: Outcome) -> tuple[float, float]:
    """Seconds for which slots were used, and free while requests waited; summed over the slots."""
    changes: list[tuple[float, int, int]] = [(outcome.end_s, 0, 0)]
    """Times, and how many sequences more wait and run from then on."""
    for record in outcome.records:
        if record.refused:
            continue
        count = record.work.sequences
        changes.append((record.arrived_s, count, 0))
        if record.started_s is not None:
            changes.append((record.started_s, -count, count))
            if record.ended_s is not None:
                changes.append((record.ended_s, 0, -count))
    busy_s = idle_s = 0.0
    waiting = running = 0
    for (now_s, more_waiting, more_running), (next_s, _, _) in pairwise(sorted(changes)):
        waiting, running = waiting + more_waiting, running + more_running
        busy_s += running * (next_s - now_s)
        idle_s += max(0, min(waiting, outcome.cluster.slots - running)) * (next_s - now_s)
    return busy_s, idle_s


def table(found: Figures, title: str) -> str:
    lines = [
        [
            group.name,
            f"{group.requests:,}",
            f"{group.answered:,}",
            f"{group.refused:,}",
            f"{group.expired:,}",
            f"{group.tokens:,}",
            f"{group.share:.1%}",
            *map(_pair, (group.wait_s, group.ttft_s, group.per_token_ms, group.whole_s)),
            "-" if math.isnan(group.good) else f"{group.good:.1%}",
        ]
        for group in found.groups
    ]
    return f"{title}\n\n{markdown([*_COLUMNS, *_TIMES, 'in SLO'], lines)}\n\n{_caption(found)}\n"


def _pair(times: Pair) -> str:
    return " / ".join(map(_short, times))


def _short(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _caption(found: Figures) -> str:
    everyone = found.groups[0]
    parts = [
        "times are p50 / p99",
        f"{found.simulated_s:,.1f} s simulated in {found.wall_s:.1f} s",
        f"{found.tokens_per_s:,.0f} tokens/s",
        f"slots used {found.slots_used:.1%}",
        f"free slots while requests waited {found.idle_slot_s:.2f} slot s",
        f"KV used at most {found.kv_used_max:.1%}",
        f"preemptions {found.preemptions:,}",
        f"prefix cache {found.cached:.1%}",
        f"claims {found.claims:,}",
        f"still open at the end {everyone.open:,}",
    ]
    return " · ".join(parts)
