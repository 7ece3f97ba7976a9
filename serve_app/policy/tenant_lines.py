"""Which tenant of a class goes next, and which of its requests. Pure.

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

from serve_app.policy.classes import VirtualCounters
from serve_app.policy.prediction import Estimated

C = TypeVar("C", bound=Estimated)


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
