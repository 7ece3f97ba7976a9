"""Consistent hashing with bounded loads. Pure.

Sources: Karger et al., *Consistent Hashing and Random Trees* (STOC '97); Mirrokni, Thorup, Zadimoghaddam,
*Consistent Hashing with Bounded Loads* (SODA '18).
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping


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
        points = sorted((_position(f"{node}#{i}"), node) for node in self.nodes for i in range(virtual_nodes))
        self._positions = [position for position, _ in points]
        self._owners = [node for _, node in points]

    def walk(self, key: str) -> Iterator[str]:
        """Every node once, in the order in which the ring meets them from the key's place on."""
        start = bisect_right(self._positions, _position(key))
        seen: set[str] = set()
        for step in range(len(self._owners)):
            owner = self._owners[(start + step) % len(self._owners)]
            if owner not in seen:
                seen.add(owner)
                yield owner
                if len(seen) == len(self.nodes):
                    return


def load_bound(in_flight: int, nodes: int, load_factor: float) -> int:
    """The most one node may hold once one more is added: `ceil(c * mean)`."""
    return math.ceil(load_factor * (in_flight + 1) / nodes)


def choose(ring: HashRing, key: str, loads: Mapping[str, int], load_factor: float, room: int | None = None) -> str:
    """The first node from the key's place on that is below its bound.

    Args:
        room: what one node can work on at a time; past it a request would wait inside of an engine while another
            has room. Where every node is full, the load bound alone decides.

    Raises:
        LookupError: the ring is empty.
    """
    if not ring.nodes:
        raise LookupError("no replica on the ring")
    bound = load_bound(sum(loads.get(node, 0) for node in ring.nodes), len(ring.nodes), load_factor)
    if room is not None and room < bound:
        for node in ring.walk(key):
            if loads.get(node, 0) < room:
                return node
    # Someone is always below: the bound times the nodes exceeds the sum.
    return next(node for node in ring.walk(key) if loads.get(node, 0) < bound)
