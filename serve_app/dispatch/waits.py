"""Why a claimed request makes no progress: one word for each, and since when. Pure.

A Redis that does not answer delays all requests, and is logged separately.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class StallReason(StrEnum):
    """What a claimed request waits for."""

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
"""StallReason that normally last as long as an answer takes."""

WITHOUT_ENGINE = (StallReason.TURN, StallReason.AGAIN, StallReason.END)
"""StallReason in which no engine has room for the request, or is about to."""


class Waiting(NamedTuple):
    """A request, and what it waits for."""

    request_id: str
    what: StallReason
    since_s: float


class StallTracker:
    """What every claimed request waits for."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, str], Waiting] = {}

    def now(self, key: tuple[str, str], request_id: str, what: StallReason, now_s: float) -> None:
        """The request waits for this from now on; if it already did, the time continues.

        Args:
            key: of its queue entry, because the same request may have two entries.
        """
        before = self._waiting.get(key)
        if before is None or before.what is not what:
            self._waiting[key] = Waiting(request_id, what, now_s)

    def over(self, key: tuple[str, str]) -> None:
        """Nobody attends to this queue entry any longer."""
        self._waiting.pop(key, None)

    def those(self, *what: StallReason) -> frozenset[tuple[str, str]]:
        """The queue entries of the requests that wait for one of these."""
        return frozenset(key for key, one in self._waiting.items() if one.what in what)

    def longer_than(self, seconds: float, now_s: float) -> list[Waiting]:
        """Requests that have waited this long for something that should be quicker."""
        return [
            waiting
            for waiting in self._waiting.values()
            if waiting.what not in NORMAL and now_s - waiting.since_s > seconds
        ]
