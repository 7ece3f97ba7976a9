"""Which replica gets a call: the choice of a consistent hash ring, with a bound on the work in
flight at each replica, in sequences. Requests with the same session key should reach the replica
that holds their KV cache. Pure.

Sources: Karger et al., *Consistent Hashing and Random Trees* (STOC '97); for the bound Mirrokni,
Thorup, Zadimoghaddam, *Consistent Hashing with Bounded Loads* (SODA '18).
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

MAX_KEY_CHARS = 256
_HEAD_CHARS = 16_384
"""Characters used of each text: enough to distinguish conversations, few enough to hash quickly."""


def _position(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class HashRing:
    """A ring of nodes: adding or removing one moves only its share of the keys. The spread of the
    shares falls with the square root of `virtual_nodes`, the points of each.
    """

    def __init__(self, nodes: Iterable[str], virtual_nodes: int = 128) -> None:
        self.nodes = frozenset(nodes)
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


class Placement:
    """Chooses replicas, and counts the sequences of the calls in flight at each."""

    def __init__(self, load_factor: float = 1.25, virtual_nodes: int = 128) -> None:
        self._load_factor = load_factor
        self._virtual_nodes = virtual_nodes
        self.slots: Mapping[str, int] = {}
        """Of each replica, for calls from here: more sequences would wait in its engine while
        another engine is free. One that is not named has slots for all.
        """
        self._ring = HashRing((), virtual_nodes)
        self._loads: dict[str, int] = {}
        self._in_flight = 0
        """The sum of the loads of the ring's replicas, kept up to date because summing for each
        call would cost more the more replicas there are.
        """

    def rebuild(self, replicas: Iterable[str]) -> None:
        """Choose from these replicas from now on; calls to other replicas no longer count."""
        self._ring = HashRing(replicas, self._virtual_nodes)
        self._in_flight = sum(self._loads.get(replica, 0) for replica in self._ring.nodes)

    def home(self, key: str) -> str:
        """The replica that the key's calls go to unless it is full. There must be a replica."""
        return next(self._ring.walk(key))

    def choose(self, key: str, sequences: int = 1) -> str:
        """The first replica on the ring after the key's position that is below the load bound and
        has slots for a call; else the first that has slots. If none has, only the load bound
        applies, and a call of several sequences goes to the least loaded. Raises LookupError if
        there is no replica.
        """
        if not self._ring.nodes:
            raise LookupError("no replica on the ring")
        # the most sequences that one may hold after one more: a multiple of the mean
        bound = math.ceil(self._load_factor * (self._in_flight + 1) / len(self._ring.nodes))
        roomy = ""
        for replica in self._ring.walk(key):
            load, most = self._loads.get(replica, 0), self.slots.get(replica, math.inf)
            if load + min(sequences, most) <= most:
                if load < bound:
                    return replica
                roomy = roomy or replica
        if roomy:
            return roomy
        if sequences > 1:
            return min(self._ring.walk(key), key=lambda name: self._loads.get(name, 0))
        # At least one replica is always below its bound: the bounds add up to more than the sum.
        return next(name for name in self._ring.walk(key) if self._loads.get(name, 0) < bound)

    def count(self, replica: str, sequences: int) -> None:
        """So many sequences are being sent to a replica, or have ended there if it is negative."""
        self._loads[replica] = self._loads.get(replica, 0) + sequences
        if not self._loads[replica]:
            del self._loads[replica]
        if replica in self._ring.nodes:
            self._in_flight += sequences


def session_key(headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
    """`x-session-id`, else OpenAI's `prompt_cache_key`, else a hash of the conversation's head.
    The head (system prompt and first user message; for a completion, its first 1,024 characters)
    does not change over the turns of a conversation. The key is empty if there is nothing to hash.
    """
    explicit = headers.get("x-session-id") or body.get("prompt_cache_key")
    if isinstance(explicit, str) and explicit:
        return explicit[:MAX_KEY_CHARS]
    head = _stable_head(body)
    return "h:" + hashlib.blake2b(head, digest_size=12).hexdigest() if head else ""


def _stable_head(body: Mapping[str, Any]) -> bytes:
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, list):
        head = []
        for message in messages:
            head.append(_shortened(message))
            if not isinstance(message, dict) or message.get("role") == "user":
                break
        return msgspec.json.encode([_shortened(body.get("instructions")), head])
    text = body.get("prompt", messages)
    if isinstance(text, list):
        text = text[0] if text and isinstance(text[0], str | list) else text
    if isinstance(text, str | list):
        return msgspec.json.encode([_shortened(body.get("instructions")), _shortened(text[:1024])])
    return b""


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        return value[:_HEAD_CHARS]
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    if isinstance(value, dict):
        return {name: _shortened(item) for name, item in value.items()}
    return value
