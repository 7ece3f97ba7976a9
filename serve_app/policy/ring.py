"""A consistent hash ring. Pure.

Source: Karger et al., *Consistent Hashing and Random Trees* (STOC '97).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator


def _position(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class HashRing:
    """A ring of nodes: adding or removing one moves only its share of the keys.

    Args:
        nodes: names, unique.
        virtual_nodes: points per node; the spread of the shares falls with its square root.
    """

    def __init__(self, nodes: Iterable[str], virtual_nodes: int = 128) -> None:
        self.nodes = sorted(set(nodes))
        points = sorted(
            (_position(f"{node}#{i}"), node) for node in self.nodes for i in range(virtual_nodes)
        )
        self._positions = [position for position, _ in points]
        self._owners = [node for _, node in points]

    def walk(self, key: str) -> Iterator[str]:
        """Every node once, in ring order after the key's position."""
        start = bisect_right(self._positions, _position(key))
        seen: set[str] = set()
        for step in range(len(self._owners)):
            owner = self._owners[(start + step) % len(self._owners)]
            if owner not in seen:
                seen.add(owner)
                yield owner
                if len(seen) == len(self.nodes):
                    return
