"""Which class goes next: shares between interactive and batch work, and ageing. Which of its
tenants: `tenant_lines.py`. Pure.

`critical` goes before all others, and only operators may use it. The rest is shared by what was
served, in token cost (`VirtualCounters`): while interactive work (`realtime` and
`standard`) and `batch` both wait, interactive work gets `interactive_share` and `batch` the rest.
Whoever waits alone gets everything. What interactive work leaves of its share it may use a little
later, up to `interactive_credit` times what runs at a time, so that a short burst does not wait
behind `batch`. `realtime` goes before `standard`, until the oldest `standard` request has waited
for `ageing_s`; from then on `standard` gets `aged_share` of the interactive work, also of what was
done while it waited.

So each class waits for a bounded time, however much more urgent work arrives, because the counters
of two parties that both wait differ by at most the largest cost of a request, divided by the share,
in each direction (and the credit): docs/evidence/order-of-work.md has the formulas. `critical` work
is not part of any share: it comes on top.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

CRITICAL = "critical"
"""Operators' own requests; `auth.critical_tenants` says who may send them."""
CLASSES = (CRITICAL, "realtime", "standard", "batch")
"""The most urgent class first."""
URGENCY = {name: rank for rank, name in enumerate(CLASSES)}
"""The less, the more urgent."""
PUBLIC_CLASSES = CLASSES[1:]
"""What every tenant may choose."""
DEFAULT_CLASS = "standard"

# OpenAI's service_tier: https://platform.openai.com/docs/guides/priority-processing and
# /flex-processing
SERVICE_TIERS = {
    **dict.fromkeys(("priority", "fast"), "realtime"),
    **dict.fromkeys(("auto", "default"), "standard"),
    "flex": "batch",
}

BATCH = "batch"
_INTERACTIVE = "interactive"
_GROUPS = {"realtime": _INTERACTIVE, "standard": _INTERACTIVE, BATCH: BATCH}


def engine_priority(request_class: str, one_of_several: bool = False) -> int:
    """What vLLM's priority scheduling gets for a sequence: the least number goes first. The class
    of a newer version counts as the default one. Within a class, those of a request of several go
    behind: one that started in fewer free slots than it has sequences would hold up the others.
    """
    return 2 * URGENCY.get(request_class, URGENCY[DEFAULT_CLASS]) + one_of_several


_KEPT = 1_000


class VirtualCounters:
    """Who has been served least, in proportion to a weight (1 unless given): virtual token counters
    from "Fairness in Serving Large Language Models" (Sheng et al., OSDI '24).

    Each party has a counter of the cost that it was served, divided by its weight, and the party
    with the least goes next. While two parties both wait, their counters differ by at most the
    largest cost of a request divided by their weights. A party that begins to wait is lifted to the
    least counter of those that wait, so that nobody saves up for later by sending nothing.
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


class ClassRules(NamedTuple):
    """How the classes share."""

    interactive_share: float = 0.7
    ageing_s: float = 10.0
    aged_share: float = 0.1
    interactive_credit: float = 4.0


class ClassOrder:
    """Chooses the class of the next request, and counts what each has been served."""

    def __init__(self, rules: ClassRules) -> None:
        share = rules.interactive_share
        self._ageing_ms = rules.ageing_s * 1000
        self._credit = rules.interactive_credit / share
        self._groups = VirtualCounters({_INTERACTIVE: share, BATCH: 1 - share})
        aged = rules.aged_share
        self._aged = VirtualCounters({"realtime": 1 - aged, "standard": aged})
        self.promotions = 0
        """How often a request went before a more urgent class because of its age."""

    def begins_to_wait(self, request_class: str, running_cost: float) -> None:
        """A class has waiting requests again; all running ones cost `running_cost` together."""
        if request_class == CRITICAL:
            return
        group = _GROUPS[request_class]
        self._groups.begins(group, self._credit * running_cost if group == _INTERACTIVE else 0.0)
        if request_class != BATCH:
            self._aged.begins(request_class)

    def waits_no_more(self, request_class: str) -> None:
        if request_class == CRITICAL:
            return
        if request_class != BATCH:
            self._aged.ends(request_class)
        if request_class == BATCH or not self._aged.waiting():
            self._groups.ends(_GROUPS[request_class])

    def choose(self, oldest_ms: Mapping[str, int], now_ms: int) -> str:
        """The class of the next request. `oldest_ms`: since when the oldest of each class waits, in
        Unix milliseconds; only classes of which some wait, and at least one.
        """
        if CRITICAL in oldest_ms:
            return CRITICAL
        interactive = [name for name in ("realtime", "standard") if name in oldest_ms]
        if not interactive or (BATCH in oldest_ms and self._groups.least() == BATCH):
            return BATCH
        if len(interactive) == 1 or not self._aged_enough(oldest_ms, now_ms):
            return interactive[0]
        return self._aged.least()

    def _aged_enough(self, oldest_ms: Mapping[str, int], now_ms: int) -> bool:
        return now_ms - oldest_ms["standard"] >= self._ageing_ms

    def starts(self, request_class: str, oldest_ms: Mapping[str, int], now_ms: int) -> None:
        """A request starts. `oldest_ms`: see `choose`. One that took a spare slot while a
        `realtime` one waited went before it because of its age only if it was old enough.
        """
        if request_class == "standard" and "realtime" in oldest_ms:
            self.promotions += self._aged_enough(oldest_ms, now_ms)

    def charge(self, request_class: str, cost: float) -> None:
        """A request of a class was served this much, or less than was charged before if it is
        negative.
        """
        if request_class == CRITICAL:
            return
        self._groups.charge(_GROUPS[request_class], cost)
        if request_class != BATCH:
            self._aged.charge(request_class, cost)
