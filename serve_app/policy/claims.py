"""How much to claim from the queue. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_AT_ONCE = 256
"""Entries of each class in one claim: reading a thousand takes some 20 ms of the event loop, in
which no stream goes on.
"""


class Claim(NamedTuple):
    """What to claim from the queue: up to `of_each` entries of each of `classes`."""

    classes: Sequence[str]
    of_each: int
    wait: bool
    """Whether to wait for an arrival if the queue is empty."""
    briefly: bool = False
    """Whether to wait only for a moment: the other classes may have room again by then."""


def what_to_claim(
    capacity: int, running: int, waiting: Mapping[str, int], ahead: int, places: int
) -> Claim | None:
    """What to claim next, if anything.

    While much is free, here or elsewhere, the free capacity is divided among the classes, rounded
    up. When little is free, or some wait already, each class is filled up to its bound.

    Args:
        capacity: requests that may run at the same time.
        running: how many do.
        waiting: how many of each class have been claimed and have not started.
        ahead: how many of each class may wait so; 0 while much is free elsewhere.
        places: how many requests the engines have room for: fewer than `capacity` if their memory
            is the bound.
    """
    free, empty = max(0, capacity - running), not any(waiting.values())
    if free and empty and (free > max(1, capacity / 4) or not ahead):
        return Claim(tuple(waiting), min(math.ceil(free / len(waiting)), _AT_ONCE), wait=True)
    room = {name: ahead - count for name, count in waiting.items() if count < ahead}
    if not room:
        return None
    # Little by little, so that several ingresses get similar parts of a sudden backlog.
    of_each = min(min(room.values()), 2 * places, _AT_ONCE)
    briefly = not free and len(room) < len(waiting)
    return Claim(tuple(room), of_each, wait=empty or not free, briefly=briefly)
