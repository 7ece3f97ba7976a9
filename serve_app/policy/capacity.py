"""How many requests may run at the same time, and the share of one ingress. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from serve_app.contract import IngressLease

_HARDLY_ANY = 1 / 8
"""Of the engines' capacity; more than is free between the end of one request and the next claim."""


def share(capacity: int, ingresses: int) -> int:
    """The part of the engines' capacity that one ingress may use.

    It is rounded up, so that an engine whose capacity is lower than the number of ingresses is used
    by all of them. The shares together exceed the capacity by at most `ingresses - 1` requests.
    """
    return math.ceil(capacity / max(1, ingresses))


def allowance(capacity: int, others: Iterable[IngressLease], waiting: bool) -> int:
    """How many requests one ingress may run at the same time.

    Without waiting requests it has its share. An ingress in which requests wait divides with those
    like it what the others leave unused, so that no engine is idle while requests wait. What others
    run already is never given out twice, but for one place: shares are rounded up, so a few of many
    ingresses may use all of the capacity for as long as requests keep coming, and what has been
    claimed in another would never start.

    Args:
        capacity: of all engines.
        others: the other ingresses, as they were half a second ago. Requests that they have started
            since then, or that use an engine again, come on top, and the engines queue them for a
            moment.
        waiting: whether requests wait in this ingress.
    """
    uses = list(others)
    mine = most = share(capacity, len(uses) + 1)
    if waiting:
        idle = [use for use in uses if use.waiting == 0]
        left = capacity - sum(use.running for use in idle)
        most = max(mine, share(left, len(uses) - len(idle) + 1))
    least = min(1, capacity) if waiting else 0
    return max(least, min(most, capacity - _used(capacity, uses)))


def hardly_any_elsewhere(capacity: int, others: Iterable[IngressLease], mine: int) -> bool:
    """Whether other ingresses can start hardly any request more, so that what waits in Redis may
    as well wait in this one.

    Args:
        capacity: of all engines.
        others: the other ingresses.
        mine: how many requests this ingress may run at the same time.
    """
    free = capacity - mine - _used(capacity, list(others))
    return free <= _HARDLY_ANY * capacity


def in_tokens(use: IngressLease) -> IngressLease:
    """The use of the engines' memory in place of their places, to divide it in the same way."""
    if use.reserved_tokens is None:
        return use._replace(running=0, waiting=None)
    return use._replace(running=use.reserved_tokens)


def _used(capacity: int, others: Sequence[IngressLease]) -> int:
    """What other ingresses run; of one that does not say, its share. That is rounded down: a queue
    that older versions do not read must be claimed by somebody.
    """
    each = capacity // (len(others) + 1)
    return sum(each if use.waiting is None else use.running for use in others)
