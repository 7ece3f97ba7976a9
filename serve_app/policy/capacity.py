"""How many sequences may run at the same time, the share of one ingress, and what to claim from the
queue. Pure.

Each worker says how many sequences its engine may run (`workers/replica.py`). Some of its slots are
spare: only urgent or predictedly short requests may take them (`serve_app/policy/order.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from serve_app.contract import IngressLease

KV_FULL = 0.85
"""The share of an engine's KV cache beyond which it takes no more sequences. What is free beyond it
is needed until the next reading.
"""
_HARDLY_ANY = 1 / 8
"""Of the engines' capacity; more than is free between the end of one request and the next claim."""
_SPARE = 1 / 8
"""Of the most sequences that an engine runs, rounded down."""
_AT_ONCE = 256
"""Entries of each class in one claim: reading a thousand takes some 20 ms of the event loop, in
which no stream goes on.
"""


def share(capacity: int, ingresses: int) -> int:
    """The part of the engines' capacity that one ingress may use.

    It is rounded up, so that an engine whose capacity is lower than the number of ingresses is used
    by all of them. The shares together exceed the capacity by at most `ingresses - 1` requests.
    """
    return math.ceil(capacity / max(1, ingresses))


def allowance(capacity: int, others: Iterable[IngressLease], waiting: bool) -> int:
    """How many sequences one ingress may run at the same time.

    Without waiting requests it has its share. An ingress in which requests wait divides with those
    like it what the others leave unused, so that no engine is idle while requests wait. What others
    run already is never given out twice, but for one slot: shares are rounded up, so a few of many
    ingresses may use all of the capacity for as long as requests keep coming, and what has been
    claimed in another would never start.

    `others` are as they were half a second ago. Requests that they have started since then, or that
    use an engine again, come on top, and the engines queue them for a moment.
    """
    uses = list(others)
    mine = most = share(capacity, len(uses) + 1)
    if waiting:
        idle = [use for use in uses if use.waiting == 0]
        left = capacity - sum(use.running for use in idle)
        most = max(mine, share(left, len(uses) - len(idle) + 1))
    least = min(1, capacity) if waiting else 0
    return max(least, min(most, capacity - sum(use.running for use in uses)))


def peers_saturated(capacity: int, others: Iterable[IngressLease], mine: int) -> bool:
    """Whether other ingresses can start hardly any request more than the `mine` that this one may
    run, so that what waits in Redis may as well wait in this one.
    """
    free = capacity - mine - sum(use.running for use in others)
    return free <= _HARDLY_ANY * capacity


def spare_slots(most: int) -> int:
    """How many slots of an engine that runs at most so many sequences are spare."""
    return math.floor(_SPARE * most)


def general_slots(capacity: int, most: int) -> int:
    """How many of a worker's slots are for all requests. One with other settings may have fewer
    slots than would be spare here, and then has none to spare.
    """
    spare = spare_slots(most)
    return capacity - spare if capacity > spare else capacity


def slots_taken(sequences: int, long: int, for_long: float) -> int:
    """How many slots are not free for the sequences of requests that run. One of several starts
    when one slot is free, so `long` may exceed the slots for all; that takes no spare ones.
    """
    return sequences - long + int(min(long, for_long))


def as_general_use(use: IngressLease) -> IngressLease:
    """The use of long slots in place of that of all, to divide them in the same way."""
    return use._replace(running=use.running_general)


class Claim(NamedTuple):
    """What to claim from the queue: up to `of_each` entries of each of `classes`."""

    classes: Sequence[str]
    of_each: int
    wait: bool
    """Whether to wait for an arrival if the queue is empty."""


def what_to_claim(
    capacity: int, taken: int, waiting: Mapping[str, int], ahead: int, only_spare_free: bool
) -> Claim | None:
    """What to claim next, if anything.

    While much is free, here or elsewhere, the free capacity is divided among the classes, rounded
    up. When little is free, or some wait already, each class is filled up to its bound.

    Args:
        capacity: sequences that may run at the same time.
        taken: how many of these slots are not free; fewer than `capacity`.
        waiting: how many requests of each class have been claimed and have not started.
        ahead: how many of each class may wait so; 0 while much is free elsewhere.
        only_spare_free: whether only an arrival can take what is free.
    """
    free, empty = capacity - taken, not any(waiting.values())
    if empty and (free > max(1, capacity / 4) or not ahead):
        return Claim(tuple(waiting), min(math.ceil(free / len(waiting)), _AT_ONCE), wait=True)
    room = {name: ahead - count for name, count in waiting.items() if count < ahead}
    if not room:
        return None
    # Little by little, so that several ingresses get similar parts of a sudden backlog.
    of_each = min(min(room.values()), 2 * capacity, _AT_ONCE)
    return Claim(tuple(room), of_each, wait=empty or only_spare_free)
