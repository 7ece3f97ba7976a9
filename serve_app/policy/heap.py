"""A heap whose items may leave from anywhere in it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, Protocol, TypeVar


class MayLeave(Protocol):
    """An item that no longer counts once it has left."""

    @property
    def left(self) -> bool:
        """Whether it has left."""
        ...


T = TypeVar("T", bound=MayLeave)


class Heap(Generic[T]):
    """Items by their key, the least first, and the earliest pushed of equals. An item that has left
    is dropped when it reaches the front, or when most of the items have left.
    """

    def __init__(self) -> None:
        self._items: list[tuple[float, int, T]] = []
        self._number = count()
        self._sweep_at = 64

    def push(self, key: float, item: T) -> None:
        if len(self._items) >= self._sweep_at:
            self._items = [one for one in self._items if not one[2].left]
            heapify(self._items)
            self._sweep_at = 2 * len(self._items) + 64
        heappush(self._items, (key, next(self._number), item))

    def first(self) -> T | None:
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

    def __iter__(self) -> Iterator[T]:
        return (item for _, _, item in self._items if not item.left)
