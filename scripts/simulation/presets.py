"""Named workloads. To add one: a function that makes its sources from a seed, with `@preset`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import NamedTuple

import msgspec

from .service import Cluster, Source, simulate
from .workloads import (
    Kind,
    Lengths,
    Make,
    azure,
    bursts,
    closed_loop,
    conversations,
    mixed,
    obedient,
    open_loop,
    poisson,
    schedule,
)

CHAT = Kind(Lengths(180, 2.0, 1500), Lengths(120, 2.0, 800))
BATCH = Kind(Lengths(400, 1.8, 1500), Lengths(250, 1.8, 1000), "batch")
REALTIME = replace(CHAT, request_class="realtime")
_CAPACITY_SLOTS = 2.0
_CAPACITY_S = 40.0
_CAPACITY_WORKS = 500


class Plan(NamedTuple):
    """A workload on a cluster."""

    cluster: Cluster
    sources: Sequence[Source]
    until_s: float | None = None


MakePlan = Callable[[Cluster, int], Plan]
"""From a cluster and a seed."""


class Preset(NamedTuple):
    """A named workload."""

    about: str
    make: MakePlan
    slots: int
    """Slots of each engine, unless the command line says otherwise."""


PRESETS: dict[str, Preset] = {}


def preset(name: str, about: str, slots: int = 32) -> Callable[[MakePlan], None]:

    def named(make: MakePlan) -> None:
        PRESETS[name] = Preset(about, make, slots)

    return named


def capacity_per_s(cluster: Cluster, make: Make) -> float:
    """Requests of a kind that a cluster ends in a second when more always wait; simulated."""
    users = round(cluster.slots * _CAPACITY_SLOTS)
    outcome = simulate(
        cluster, [closed_loop(users, make, _CAPACITY_S, "capacity")], until_s=_CAPACITY_S
    )
    half_s = _CAPACITY_S / 2
    late = [one for one in outcome.records if one.answered and (one.ended_s or 0.0) > half_s]
    return len(late) / half_s


def loaded(cluster: Cluster, make: Make, load: float, duration_s: float, seed: str) -> Source:
    """Independent clients who cause `load` times what the cluster can do."""
    rate_per_s = capacity_per_s(cluster, make) * load
    return open_loop(poisson(rate_per_s, duration_s, seed), make, seed)


def _by_priority(cluster: Cluster, blocks: int) -> Cluster:
    """The same cluster with so much KV, and by priority, as workers have vLLM do."""
    engine = msgspec.structs.replace(
        cluster.engine, num_gpu_blocks=blocks, priority_scheduling=True
    )
    return replace(cluster, engine=engine)


@preset("interactive-and-batch", "realtime and batch requests, both always waiting")
def _interactive_and_batch(cluster: Cluster, seed: int) -> Plan:
    users = 3 * cluster.slots
    sources = [
        closed_loop(users, REALTIME, 120, f"{seed}/realtime"),
        closed_loop(users, replace(CHAT, request_class="batch"), 120, f"{seed}/batch"),
    ]
    return Plan(cluster, sources, 120)


@preset("flood", "5,000 batch requests arrive at once among realtime ones (40 % load)")
def _flood(cluster: Cluster, seed: int) -> Plan:
    sources = [
        loaded(cluster, REALTIME, 0.4, 240, f"{seed}/realtime"),
        open_loop([60 + 1e-3 * number for number in range(5000)], BATCH, f"{seed}/batch"),
    ]
    return Plan(cluster, sources, 240)


_WITHIN_S = 30.0
_WARM_S, _OVER_S = 30.0, 120.0


def overloaded(
    cluster: Cluster,
    seed: int,
    loads: Mapping[str, float],
    rate_per_s: float | None = None,
    over_s: float = _OVER_S,
) -> Plan:
    """Chats that must end within 30 s: 30 s of 100 % load, of which each tenant has an equal part,
    and then for each tenant its load, for `over_s`. `rate_per_s`: of 100 %, if that is known.
    """
    cluster = replace(cluster, refuses=True)
    rate_per_s, sources = rate_per_s or capacity_per_s(cluster, CHAT), []
    for tenant, load in loads.items():
        kind, name = replace(CHAT, tenant=tenant, within_s=_WITHIN_S), f"{seed}/{tenant}"
        arrivals_s = poisson(rate_per_s / len(loads), _WARM_S, f"{name}/warm")
        later_s = poisson(rate_per_s * load, over_s, f"{name}/over")
        arrivals_s += [_WARM_S + at_s for at_s in later_s]
        sources.append(obedient(arrivals_s, kind, name))
    return Plan(cluster, sources, _WARM_S + over_s)


@preset("full", "chats that must end within 30 s; 100 % load", 16)
def _full(cluster: Cluster, seed: int) -> Plan:
    return overloaded(cluster, seed, {"tenant-0": 1.0})


@preset("overload", "`full` and then 500 % load; who is refused obeys Retry-After once", 16)
def _overload(cluster: Cluster, seed: int) -> Plan:
    return overloaded(cluster, seed, {"tenant-0": 5.0})


@preset("overload-tenants", "the same of two tenants, of which the first has weight 4", 16)
def _overload_tenants(cluster: Cluster, seed: int) -> Plan:
    cluster = replace(cluster, weights={"heavy": 4.0})
    return overloaded(cluster, seed, {"heavy": 2.5, "light": 2.5})


@preset("no-flood", "the realtime requests of `flood` alone, to compare with")
def _no_flood(cluster: Cluster, seed: int) -> Plan:
    return Plan(cluster, [loaded(cluster, REALTIME, 0.4, 240, f"{seed}/realtime")], 240)


@preset("noisy-tenant", "one tenant sends ten times as much as a light one; 90 % load")
def _noisy_tenant(cluster: Cluster, seed: int) -> Plan:
    light, noisy = (replace(CHAT, tenant=name) for name in ("light", "noisy"))
    rate_per_s = 0.9 * capacity_per_s(cluster, CHAT)
    sources = [
        open_loop(poisson(rate_per_s / 11, 300, f"{seed}/light"), light, f"{seed}/light"),
        open_loop(bursts(rate_per_s * 10 / 11, 3, 300, f"{seed}/noisy"), noisy, f"{seed}/noisy"),
    ]
    return Plan(cluster, sources)


@preset("many-answers", "a tenant always asks for 112 long answers at once, others chat", 128)
def _many_answers(cluster: Cluster, seed: int) -> Plan:
    return _beside_chats(cluster, seed, cluster.max_running_requests * 7 // 8)


@preset("many-requests", "`many-answers`, but each of the answers has a request of its own", 128)
def _many_requests(cluster: Cluster, seed: int) -> Plan:
    return _beside_chats(cluster, seed, 1)


def _beside_chats(cluster: Cluster, seed: int, sequences: int) -> Plan:
    """Four times as many answers as there are slots for all, and chats of 10 % load."""
    cluster = _by_priority(cluster, cluster.engine.num_gpu_blocks)
    users = 4 * (cluster.slots * 7 // 8) // sequences
    many = Kind(Lengths(200, 1.5, 800), Lengths(2000, 1.0), tenant="many", sequences=sequences)
    chats = [(1.0, replace(CHAT, tenant=f"chat-{number}", name="chat")) for number in range(5)]
    sources = [
        closed_loop(users, many, 300, f"{seed}/many"),
        loaded(cluster, mixed(*chats), 0.1, 300, f"{seed}/chats"),
    ]
    return Plan(cluster, sources, 300)


@preset("quiet-tenants", "`noisy-tenant`, but ten tenants like the light one do what that one did")
def _quiet_tenants(cluster: Cluster, seed: int) -> Plan:
    rate_per_s = 0.9 * capacity_per_s(cluster, CHAT) / 11
    names = ("light", *(f"other-{number}" for number in range(10)))
    sources = [
        open_loop(
            poisson(rate_per_s, 300, f"{seed}/{name}"), replace(CHAT, tenant=name), f"{seed}/{name}"
        )
        for name in names
    ]
    return Plan(cluster, sources)


@preset("two-tenants", "two tenants always waiting; one's answers and prompts are ten times longer")
def _two_tenants(cluster: Cluster, seed: int) -> Plan:
    short = Kind(Lengths(60, 1.3, 300), Lengths(60, 1.3, 300), tenant="short")
    long = Kind(Lengths(600, 1.3, 3000), Lengths(600, 1.3, 3000), tenant="long")
    users = 3 * cluster.slots
    sources = [closed_loop(users, kind, 200, f"{seed}/{kind.tenant}") for kind in (short, long)]
    return Plan(cluster, sources, 200)


@preset("mixed", "realtime, standard and batch requests of six tenants in bursts; 90 % load")
def _mixed(cluster: Cluster, seed: int) -> Plan:
    tenants = [f"tenant-{number}" for number in range(6)]
    kinds = [
        (weight / (1 + place), replace(kind, tenant=tenant))
        for place, tenant in enumerate(tenants)
        for weight, kind in ((3, REALTIME), (4, CHAT), (2, BATCH))
    ]
    make = mixed(*kinds)
    rate_per_s = 0.9 * capacity_per_s(cluster, make)
    return Plan(cluster, [open_loop(bursts(rate_per_s, 2, 300, f"{seed}"), make, f"{seed}/mixed")])


@preset("clients", "24 kinds of clients of one tenant, each with its own lengths; 90 % load")
def _clients(cluster: Cluster, seed: int) -> Plan:
    kinds = [
        (1.0, Kind(Lengths(100, 1.5), Lengths(20 * 1.2**number, 1.6, 3000), name=f"kind-{number}"))
        for number in range(24)
    ]
    return Plan(cluster, [loaded(cluster, mixed(*kinds), 0.9, 300, f"{seed}/clients")])


@preset(
    "azure", "3,000 requests of Azure's trace, all of one tenant and class; 90 % load", slots=128
)
def _azure(cluster: Cluster, seed: int) -> Plan:
    timed = azure(seed, 3000, cluster.engine.longest())
    works = cycle(work for _, work in timed[:: max(1, len(timed) // _CAPACITY_WORKS)])
    rate_per_s = len(timed) / (timed[-1][0] - timed[0][0])
    speed = 0.9 * capacity_per_s(cluster, lambda _: next(works)) / rate_per_s
    return Plan(cluster, [schedule([(at_s / speed, work) for at_s, work in timed])])


@preset("kv-bound", "chats that always wait, on engines whose KV is full before their slots", 128)
def _kv_bound(cluster: Cluster, seed: int) -> Plan:
    cluster = _by_priority(cluster, 900)
    return Plan(cluster, [closed_loop(2 * cluster.slots, CHAT, 240, f"{seed}/chat")], 240)


@preset("long-prompts", "prompts that share nothing and always wait; `kv-bound` engines", 128)
def _long_prompts(cluster: Cluster, seed: int) -> Plan:
    cluster = _by_priority(cluster, 1200)
    kind = Kind(Lengths(1200, 1.6, 3000), Lengths(80, 2.0, 600), name="long")
    return Plan(cluster, [closed_loop(cluster.slots, kind, 300, f"{seed}/long")], 300)


@preset(
    "held-batch", "prompts of a third of an engine's KV always wait, beside urgent requests", 128
)
def _held_batch(cluster: Cluster, seed: int) -> Plan:
    cluster = _by_priority(cluster, 300)
    long = Kind(Lengths(3000, 1.1, 3400), Lengths(200, 1.5, 600), "batch", "long")
    urgent = [replace(CHAT, request_class=name, name=name) for name in ("critical", "realtime")]
    rate_per_s = 0.25 * capacity_per_s(cluster, CHAT)
    sources = [
        closed_loop(12, long, 300, f"{seed}/long"),
        *(
            open_loop(poisson(share * rate_per_s, 300, f"{seed}/{kind.name}"), kind, kind.name)
            for share, kind in zip((0.1, 0.9), urgent, strict=True)
        ),
    ]
    return Plan(cluster, sources, 300)


@preset("steady", "chats at 60 % load, two minutes")
def _steady(cluster: Cluster, seed: int) -> Plan:
    return Plan(cluster, [loaded(cluster, CHAT, 0.6, 120, f"{seed}/steady")])


@preset("conversations", "conversations with thinking in between; their beginning is in the cache")
def _conversations(cluster: Cluster, seed: int) -> Plan:
    return Plan(cluster, [conversations(poisson(1.5, 300, f"{seed}"), f"{seed}")])
