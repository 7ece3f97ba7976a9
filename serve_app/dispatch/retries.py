"""What follows a lost attempt, and why a claimed request makes no progress meanwhile. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
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
    """The next attempt, or None: then the request is poison, after so many losses that count
    against it, and gets no other.

    Args:
        opened: for each attempt that a worker has opened, why the attempt before it ended.
        newest_epoch: of the last of them; 0 if there is none.
        cause: why the last attempt, which was run or watched, has ended.
        tried: the attempt that was run; None if another ingress had started it.
    """
    # it never began, so nothing counts against it
    if tried is not None and newest_epoch < tried.epoch:
        return tried._replace(refused=tried.refused + 1)
    losses = sum(before in BLAMED for before in (*opened[1:], cause))
    if losses >= poison_after:
        return None
    return Next(newest_epoch + 1, cause, quarantined=losses == poison_after - 1 > 0)


class StallReason(StrEnum):
    """What a claimed request waits for. A Redis that does not answer delays all requests, and is
    logged separately.
    """

    OPENING = "opening"
    """Its call is on the way to a worker, which has not opened the attempt yet."""
    ENGINE = "engine"
    """A worker has opened the attempt, and holds its lease."""
    ADOPTED = "adopted"
    """The same, with an attempt that another ingress has started."""
    TURN = "turn"
    """It has killed engines, and such requests run one at a time."""
    AGAIN = "again"
    """An attempt could not even be opened; it pauses before the next one."""
    END = "end"
    """It is ended without an engine, and Redis is told so."""


NORMAL = frozenset({StallReason.ENGINE, StallReason.ADOPTED})
"""Waits that normally last as long as an answer takes."""

WITHOUT_ENGINE = (StallReason.TURN, StallReason.AGAIN, StallReason.END)
"""Waits in which no engine has room for the request, or is about to."""


class Stalled(NamedTuple):
    """A request, and what it waits for since when."""

    request_id: str
    reason: StallReason
    since_s: float


class StallTracker:
    """What every claimed request waits for, by its queue entry: a request may have two."""

    def __init__(self) -> None:
        self._stalled: dict[tuple[str, str], Stalled] = {}

    def set(self, key: tuple[str, str], request_id: str, reason: StallReason, now_s: float) -> None:
        """The request waits for this from now on; if it already did, the time continues."""
        before = self._stalled.get(key)
        if before is None or before.reason is not reason:
            self._stalled[key] = Stalled(request_id, reason, now_s)

    def clear(self, key: tuple[str, str]) -> None:
        """Nobody attends to this queue entry any longer."""
        self._stalled.pop(key, None)

    def keys(self, *reasons: StallReason) -> frozenset[tuple[str, str]]:
        """The queue entries of the requests that wait for one of these."""
        return frozenset(key for key, one in self._stalled.items() if one.reason in reasons)

    def longer_than(self, seconds: float, now_s: float) -> list[Stalled]:
        """Requests that have waited this long for something that should be quicker."""
        return [
            one
            for one in self._stalled.values()
            if one.reason not in NORMAL and now_s - one.since_s > seconds
        ]
