"""Decides what follows a lost attempt: the next one (at once or later, alone or not) or the end.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from serve_app.contract import Cause

BLAMED = (Cause.LOST, Cause.HUNG)
"""Causes that count against a request, because it may be why its worker died or hung."""


class Next(NamedTuple):
    """The attempt to run."""

    epoch: int
    cause: Cause | None = None
    """Why the previous attempt ended."""
    refused: int = 0
    """How often no worker has opened it; the pause before it grows with this number."""
    quarantined: bool = False
    """Whether losing this attempt would make the request poison. Such requests run one at a time.
    """


def after_loss(
    opened: Sequence[str], newest_epoch: int, cause: Cause, tried: Next | None, poison_after: int
) -> Next | None:
    """The next attempt, or None: then the request is poison and gets no other.

    Args:
        opened: for each attempt that a worker has opened, why the attempt before it ended.
        newest_epoch: of the last of them; 0 if there is none.
        cause: why the last attempt, which was run or watched, has ended.
        tried: the attempt that was run; None if it was only watched, because another ingress had
            started it.
        poison_after: after this many losses that count against it, a request is poison.
    """
    # it never began, so nothing counts against it
    if tried is not None and newest_epoch < tried.epoch:
        return tried._replace(refused=tried.refused + 1)
    losses = sum(before in BLAMED for before in (*opened[1:], cause))
    if losses >= poison_after:
        return None
    return Next(newest_epoch + 1, cause, quarantined=losses == poison_after - 1 > 0)
