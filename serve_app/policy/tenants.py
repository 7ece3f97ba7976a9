"""The waiting requests of one class, shared fairly by its tenants. Pure.

The tenant that was served least in proportion to its weight goes next
(`serve_app/policy/fairness.py`). A tenant pays for a request when it starts, with what is known
then: its prompt and the output that is expected. The rest is charged, or given back, when the
request has ended; all of it if no worker has worked on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import nsmallest
from typing import Generic, NamedTuple, TypeVar

from serve_app.policy.fairness import VirtualCounters
from serve_app.policy.waiting import Claimed, Heap, Waiting

C = TypeVar("C", bound=Claimed)

MOST_PROMPT_TOKENS = 131_072
"""What counts of an estimate. Sixteen megabytes of text would be four million tokens, which the
engine refuses at once.
"""


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
        """A request begins to wait."""
        self.by_rank.push(waiting.rank_ms, waiting)
        self._by_latest.push(waiting.latest_ms, waiting)
        self.by_size.push(waiting.size, waiting)

    def next(self, now_ms: float, soon_ms: float) -> Waiting[C] | None:
        """See `TenantLines.next`."""
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
        """How many wait."""
        return self._size

    def __iter__(self) -> Iterator[Waiting[C]]:
        """All that wait, in any order."""
        return iter(self._by_age)

    @property
    def oldest_ms(self) -> int:
        """Since when the oldest of them waits, in Unix milliseconds; some must wait."""
        oldest = self._by_age.first()
        assert oldest is not None
        return oldest.entry.enqueued_ms

    def add(self, waiting: Waiting[C]) -> None:
        """A request begins to wait."""
        tenant = waiting.entry.tenant
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line()
            self.counters.begins(tenant)
        line.push(waiting)
        self._by_age.push(waiting.entry.enqueued_ms, waiting)
        self._size += 1

    def next(self, now_ms: float, soon_ms: float) -> Waiting[C]:
        """The request that goes next; some must wait. `remove` it when it starts.

        Of a tenant's requests, those go first that must start within `soon_ms` to meet their
        deadlines, the most urgent first; not those for which it is too late.
        """
        chosen = self._lines[self.counters.least()].next(now_ms, soon_ms)
        assert chosen is not None, "a tenant without requests has no line"
        return chosen

    def least_of_each(self, tenants: int) -> Iterator[Waiting[C]]:
        """Of each of the tenants that were served least, the request that will probably write
        least, in about; the oldest of equals.
        """
        counters = self.counters.waiting()
        for name in nsmallest(tenants, counters, key=counters.__getitem__):
            least = self._lines[name].by_size.first()
            assert least is not None
            yield least

    def remove(self, waiting: Waiting[C]) -> None:
        """A request waits no more."""
        waiting.left = True
        self._size -= 1
        tenant = waiting.entry.tenant
        if self._lines[tenant].by_rank.first() is None:
            del self._lines[tenant]
            self.counters.ends(tenant)
