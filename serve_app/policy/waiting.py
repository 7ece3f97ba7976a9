"""A claimed request while it waits and while it runs, what policies know of it, and the heap from
which it may leave. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, NamedTuple, Protocol, TypeVar

from serve_app.contract import Written


class Claimed(Protocol):
    """The properties of a request that the policies consider."""

    @property
    def request_class(self) -> str:
        """One of `CLASSES`."""
        ...

    @property
    def tenant(self) -> str:
        """Whose request it is."""
        ...

    @property
    def enqueued_ms(self) -> int:
        """Unix milliseconds, by Redis's clock."""
        ...

    @property
    def deadline_ms(self) -> int:
        """Unix milliseconds, by Redis's clock."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """An estimate of the tokens that it reads."""
        ...

    @property
    def max_output_tokens(self) -> int:
        """The most that each sequence may write; 0 if the client gave no limit."""
        ...

    @property
    def sequences(self) -> int:
        """How many sequences it asks for, at least 1; an engine may run fewer at a time."""
        ...

    @property
    def kind(self) -> str:
        """What else shows of its length before it is computed, see `Work`."""
        ...


C = TypeVar("C", bound=Claimed)


class Prediction(NamedTuple):
    """What each sequence of a request will probably write, in tokens; `p50` by the mean of the
    logarithms.
    """

    p50: float
    mean: float


class Waiting(Generic[C]):
    """A request from its claim to its start."""

    __slots__ = ("entry", "latest_ms", "left", "rank_ms", "size")

    def __init__(self, entry: C, rank_ms: float, latest_ms: float, size: int) -> None:
        self.entry = entry
        self.rank_ms = rank_ms
        """Its place among its tenant's requests: the least goes first."""
        self.latest_ms = latest_ms
        """Until when it must start to meet its deadline, as predicted."""
        self.size = size
        """The binary order of magnitude of its predicted output."""
        self.left = False
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
            self._items = [one for one in self._items if not one[2].left]
            heapify(self._items)
            self._sweep_at = 2 * len(self._items) + 64
        heappush(self._items, (key, next(self._number), item))

    def first(self) -> Waiting[C] | None:
        """The item with the least key; None if there is none."""
        while self._items:
            item = self._items[0][2]
            if not item.left:
                return item
            heappop(self._items)
        return None

    def pop(self) -> None:
        """Drop the item with the least key; there must be one."""
        heappop(self._items)

    def __iter__(self) -> Iterator[Waiting[C]]:
        return (item for _, _, item in self._items if not item.left)


class Running(Generic[C]):
    """A request from its start to its end. Compared by identity: a duplicate queue entry has its
    own.
    """

    def __init__(self, entry: C, predicted: Prediction) -> None:
        self.entry = entry
        self.predicted = predicted
        """What it was expected to write when it started."""
        self.sequences = 0
        """Those that its engine runs at a time; 0 if it uses no engine."""
        self.holds_slots = True
        """Whether nobody else may have its slots: not while it waits in quarantine."""
        self.long = False
        """Whether it had no right to a spare slot when it started."""
        self.tries = False
        """Whether it is the first of its kind, and holds a spare slot."""
        self.cost = 0.0
        """What its tenant has paid in advance."""
        self.started_ms: int | None = None
        """Unix milliseconds, by Redis's clock. None if it was taken over while it ran."""


class Settled(NamedTuple):
    """A request that has ended: what was expected when it started, and what it has written."""

    entry: Claimed
    predicted: Prediction
    written: Written
    cost: float
