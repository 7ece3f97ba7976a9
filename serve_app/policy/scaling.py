"""How many engines the work needs: what the workers tell Ray Serve, and what Serve's controller
makes of it. Pure.

Serve's own policy counts the calls that run. But no more are started than the engines can run, and
everything else waits in Redis: the longer the prompts, the fewer calls, and Serve would shrink a
fleet under a full queue. So every worker sums up what runs and what waits, from the leases that it
reads anyway, and `replicas_wanted` is Serve's policy (`AutoscalingConfig.policy`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from serve_app.contract import EngineReport, IngressLease
from serve_app.policy.order import KV_FULL, general_slots

SEQUENCES, WAITING, PER_ENGINE = "sequences", "waiting", "sequences_per_engine"
"""What a worker tells; every worker of a Ray cluster tells the same."""
_SPARED = 1.25
"""A replica leaves only if the others then have work for four fifths of the target. Otherwise a
fleet of engines that hold a dozen sequences each would shrink and grow again with every chance.
"""


def load(
    ingresses: Sequence[IngressLease], engines: Iterable[EngineReport], slots: int
) -> dict[str, float]:
    """What there is to do for the engines of this Ray cluster, of which each runs at most `slots`
    sequences.
    """
    waiting = sum(one.waiting for one in ingresses)
    waiting += max((one.unclaimed for one in ingresses), default=0)
    running = sum(one.running for one in ingresses)
    each = per_engine(engines, slots)
    return {SEQUENCES: running + waiting, WAITING: waiting, PER_ENGINE: each}


def per_engine(engines: Iterable[EngineReport], slots: int) -> float:
    """How many sequences one engine can hold: its slots without the spare ones, or fewer if its KV
    cache is full before, by what the running ones use of it.
    """
    most = general_slots(slots, slots)
    busy = [one for one in engines if one.kv_tokens and one.running]
    used = sum(one.used_tokens / one.kv_tokens for one in busy)
    running = sum(one.running for one in busy)
    return max(1.0, min(most, KV_FULL * running / used)) if used else most


def replicas_wanted(context: Any) -> tuple[float, dict[str, Any]]:
    """Ray Serve's hook (2.60), called in its controller some ten times a second: how many replicas
    the newest numbers call for. Serve applies the delays and the bounds.

    The controller may lack the service's code: Serve pickles this function with what it uses of
    this module. Without numbers, as while Redis is away, the target stays. While anything waits,
    one more is wanted, whatever else the numbers say.
    """
    target, told = context.target_num_replicas, context.raw_metrics
    series = {replica: points for replica, points in told.get(SEQUENCES, {}).items() if points}
    if not series:
        return target, {}
    newest = max(series, key=lambda replica: series[replica][-1].timestamp)
    sequences, waiting, held = (
        told[name][newest][-1].value for name in (SEQUENCES, WAITING, PER_ENGINE)
    )
    wanted = sequences / min(context.config.get_target_ongoing_requests(), held)
    if waiting:
        wanted = max(wanted, context.current_num_replicas + 1)
    return max(wanted, min(target, _SPARED * wanted)), {}
