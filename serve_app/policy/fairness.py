"""Virtual token counters: who has been served least, in proportion to a weight. Pure.

From "Fairness in Serving Large Language Models" (Sheng et al., OSDI '24). Each party has a counter
of the cost that it was served, divided by its weight, and the party with the least goes next. While
two parties both wait, their counters differ by at most the largest cost of a request divided by
their weights. A party that begins to wait is lifted to the least counter of those that wait, so
that nobody saves up for later by sending nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

_KEPT = 1_000


class VirtualCounters:
    """The counters of parties that share something.

    Args:
        weights: of the parties; others have the weight 1.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._idle: dict[str, float] = {}
        self._waiting: dict[str, float] = {}
        self._floor = 0.0

    def begins(self, name: str, credit: float = 0.0) -> None:
        """A party has waiting requests; a second call changes nothing. `credit`: how much it may
        have saved up.
        """
        if name not in self._waiting:
            least = min(self._waiting.values()) if self._waiting else self._floor
            self._waiting[name] = max(self._idle.pop(name, least), least - credit)

    def ends(self, name: str) -> None:
        """No request of a party waits any more."""
        counter = self._waiting.pop(name, None)
        if counter is None:
            return
        self._idle[name] = counter
        if not self._waiting:
            self._floor = counter
        while len(self._idle) > _KEPT:  # the longest idle one: what it was served is forgotten
            del self._idle[next(iter(self._idle))]

    def charge(self, name: str, cost: float) -> None:
        """A party was served this much; negative if it was charged too much before."""
        counters = self._waiting if name in self._waiting else self._idle
        counters[name] = counters.get(name, self._floor) + cost / self._weights.get(name, 1.0)

    def least(self) -> str:
        """Of the parties that wait, the one that was served least; the longest waiting of
        equals.
        """
        return min(self._waiting, key=self._waiting.__getitem__)

    def waiting(self) -> Mapping[str, float]:
        """The counters of those that wait."""
        return self._waiting
