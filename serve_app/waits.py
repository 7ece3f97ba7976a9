"""Why a request that this process carries does not move: one word for each, and since when. Pure.

A Redis that does not answer holds up all at once, and has a line of its own in the log.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Waits(StrEnum):
    """What a carried request waits for."""

    OPENING = "opening"
    """Its call is on the way to a worker, which has not opened the attempt yet."""
    ENGINE = "engine"
    """A worker has opened the attempt, and holds its lease."""
    ADOPTED = "adopted"
    """The same, under an attempt that another ingress has started."""
    TURN = "turn"
    """It has taken engines down: such requests run one at a time."""
    AGAIN = "again"
    """An attempt could not even be opened: a moment until the next."""


NORMAL = frozenset({Waits.ENGINE, Waits.ADOPTED})
"""As long as an answer takes."""


class Waiting(NamedTuple):
    """A request, by the id of its queue entry, and what it waits for."""

    request_id: str
    what: Waits
    since_s: float


class WhyItWaits:
    """What every carried request waits for."""

    def __init__(self) -> None:
        self._waiting: dict[str, Waiting] = {}

    def now(self, entry_id: str, request_id: str, what: Waits, now_s: float) -> None:
        """From here on it waits for this; where it did so before, the time goes on."""
        before = self._waiting.get(entry_id)
        if before is None or before.what is not what:
            self._waiting[entry_id] = Waiting(request_id, what, now_s)

    def over(self, entry_id: str) -> None:
        """It is carried no longer."""
        self._waiting.pop(entry_id, None)

    def longer_than(self, seconds: float, now_s: float) -> list[Waiting]:
        """Who has waited so long for what should not take as long."""
        return [
            waiting
            for waiting in self._waiting.values()
            if waiting.what not in NORMAL and now_s - waiting.since_s > seconds
        ]
