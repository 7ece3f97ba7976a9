"""Which class goes next: shares between interactive and batch work, and ageing; and which of its
tenants. Pure.

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

Of the tenants with requests of that class, the one that was served least in proportion to its
weight goes next (`VirtualCounters`). It pays for a request when it starts, with what is known then:
its prompt and the output that is expected. The rest is charged, or given back, when the request has
ended; all of it if no worker has worked on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, nsmallest
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from serve_app.policy.prediction import Estimated

C = TypeVar("C", bound=Estimated)

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


MOST_PROMPT_TOKENS = 131_072
"""What counts of an estimate. Sixteen megabytes of text would be four million tokens, which the
engine refuses at once.
"""


@dataclass(eq=False, slots=True)
class Waiting(Generic[C]):
    """A request from its claim to its start."""

    entry: C
    rank_ms: float
    """Its place among its tenant's requests: the least goes first."""
    latest_ms: float
    """Until when it must start to meet its deadline, as predicted."""
    size: int
    """The binary order of magnitude of its predicted output."""
    removed: bool = False
    """Whether it has started."""


class Heap(Generic[C]):
    """Waiting requests by a key, the least first, and the earliest pushed of equals. One that has
    left is dropped when it reaches the front, or when most of them have left.
    """

    def __init__(self) -> None:
        self._items: list[tuple[float, int, Waiting[C]]] = []
        self._number = count()
        self._sweep_at = 64

    def push(self, key: float, item: Waiting[C]) -> None:
        if len(self._items) >= self._sweep_at:
            self._items = [one for one in self._items if not one[2].removed]
            heapify(self._items)
            self._sweep_at = 2 * len(self._items) + 64
        heappush(self._items, (key, next(self._number), item))

    def first(self) -> Waiting[C] | None:
        """The item with the least key; None if there is none."""
        while self._items:
            item = self._items[0][2]
            if not item.removed:
                return item
            heappop(self._items)
        return None

    def pop(self) -> None:
        """Drop the item with the least key; there must be one."""
        heappop(self._items)

    def __iter__(self) -> Iterator[Waiting[C]]:
        return (item for _, _, item in self._items if not item.removed)


class TenantRules(NamedTuple):
    """How tenants share, and what a request costs."""

    weights: Mapping[str, float] = {}
    prompt_weight: float = 1.0
    output_weight: float = 2.0

    def cost(self, prompt_tokens: int, output_tokens: float) -> float:
        """The cost of a request; at least 1, so that no request is free."""
        return max(1.0, self.prompt_weight * prompt_tokens + self.output_weight * output_tokens)


class _Line(Generic[C]):
    """The waiting requests of one tenant."""

    def __init__(self) -> None:
        self.by_rank: Heap[C] = Heap()
        self._by_latest: Heap[C] = Heap()
        self.by_size: Heap[C] = Heap()

    def push(self, waiting: Waiting[C]) -> None:
        self.by_rank.push(waiting.rank_ms, waiting)
        self._by_latest.push(waiting.latest_ms, waiting)
        self.by_size.push(waiting.size, waiting)

    def next(self, now_ms: float, soon_ms: float) -> Waiting[C] | None:
        while (urgent := self._by_latest.first()) is not None:
            if urgent.latest_ms > now_ms + soon_ms:
                break
            if urgent.latest_ms >= now_ms:
                return urgent
            self._by_latest.pop()  # too late: it keeps its place among the others
        return self.by_rank.first()


class TenantLines(Generic[C]):
    """The waiting requests of one class, one line for each tenant."""

    def __init__(self, rules: TenantRules) -> None:
        self.counters = VirtualCounters(rules.weights)
        self._lines: dict[str, _Line[C]] = {}
        self._by_age: Heap[C] = Heap()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Waiting[C]]:
        return iter(self._by_age)

    @property
    def oldest_ms(self) -> int:
        """Since when the oldest of them waits, in Unix milliseconds; some must wait."""
        oldest = self._by_age.first()
        assert oldest is not None
        return oldest.entry.accepted_ms

    def add(self, waiting: Waiting[C]) -> None:
        tenant = waiting.entry.tenant
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line()
            self.counters.begins(tenant)
        line.push(waiting)
        self._by_age.push(waiting.entry.accepted_ms, waiting)
        self._size += 1

    def next(self, now_ms: float, soon_ms: float) -> Waiting[C]:
        """The request that goes next; some must wait. `remove` it when it starts.

        Of a tenant's requests, those go first that must start within `soon_ms` to meet their
        deadlines, the most urgent first; not those for which it is too late.
        """
        chosen = self._lines[self.counters.least()].next(now_ms, soon_ms)
        assert chosen is not None, "a tenant without requests has no line"
        return chosen

    def shortest_per_tenant(self, tenants: int) -> Iterator[Waiting[C]]:
        """Of each of the tenants that were served least, the request that will probably write
        least, in about; the oldest of equals.
        """
        counters = self.counters.waiting()
        for name in nsmallest(tenants, counters, key=counters.__getitem__):
            least = self._lines[name].by_size.first()
            assert least is not None
            yield least

    def remove(self, waiting: Waiting[C]) -> None:
        waiting.removed = True
        self._size -= 1
        tenant = waiting.entry.tenant
        if self._lines[tenant].by_rank.first() is None:
            del self._lines[tenant]
            self.counters.ends(tenant)
