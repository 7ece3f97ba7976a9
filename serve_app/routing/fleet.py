"""Which replicas can take work, and which request was sent where. Pure; one in every ingress process.

Two views meet here: Ray Serve's set of running replicas (a replica that drains has left it, but goes on working)
and the leases of the workers (a replica that hangs or whose engine is sick has lost it, but Serve still sends to it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

_AVOID_S = 5.0
DRAINED = "drained"
HUNG = "hung"
"""Its lease has ended while Redis was there to renew it: the request under which that happens may be why."""
AWAY = "away"
"""Its lease has ended while nobody knows whether it could be renewed: nobody is to blame."""


class Fleet:
    """The replicas, as this process sees them.

    `on_loss(request_id, cause)` is called for every request whose replica has left one of the two views.
    """

    def __init__(self) -> None:
        self.on_loss: Callable[[str, str], None] = lambda request_id, cause: None
        self._serving: frozenset[str] = frozenset()
        self._leased: frozenset[str] | None = None
        self._unblamed: frozenset[str] = frozenset()
        self._placed: dict[str, str] = {}
        self._avoided: dict[str, float] = {}
        self.version = 0

    def place(self, request_id: str, replica: str) -> None:
        """The request is being sent to a replica."""
        self._placed[request_id] = replica

    def release(self, request_id: str) -> None:
        """Nobody waits for that replica any more."""
        self._placed.pop(request_id, None)

    def avoid(self, request_id: str, now_s: float) -> None:
        """A call to this request's replica failed: perhaps it is dead, and neither Serve nor its lease say so yet."""
        replica = self._placed.get(request_id)
        if replica is not None:
            self._avoided[replica] = now_s + _AVOID_S
            self.version += 1

    def forgive(self, now_s: float) -> None:
        """Try those again that have been avoided for long enough."""
        over = [replica for replica, until_s in self._avoided.items() if until_s <= now_s]
        for replica in over:
            del self._avoided[replica]
            self.version += 1

    def serving(self, replicas: Iterable[str]) -> None:
        """Ray Serve's running replicas have changed."""
        now = frozenset(replicas)
        left, self._serving = self._serving - now, now
        self.version += 1
        self._lose(left, DRAINED)

    def leased(self, replicas: Iterable[str] | None) -> None:
        """The workers that hold a lease; None where that is not known, such as while Redis is away."""
        now = None if replicas is None else frozenset(replicas)
        if now == self._leased:
            return
        before, self._leased = self._leased, now
        self.version += 1
        if now is None:
            return
        missing = frozenset(self._placed.values()) - now
        self._unblamed = (self._unblamed if before is not None else self._serving | missing) - now
        self._lose(missing & self._unblamed, AWAY)
        self._lose(missing - self._unblamed, HUNG)

    def mine(self, workers: Iterable[tuple[str, int]]) -> dict[str, int]:
        """The leased workers of this Ray cluster and their room, of all that share the namespace.

        In an upgrade without downtime there are two: the new one must claim nothing before its own engines are there.
        """
        return {name: room for name, room in workers if name in self._serving}

    def able(self) -> frozenset[str]:
        """Who can take work: leased and running, and no call has failed there just now, unless it is so with all."""
        there = self._serving if self._leased is None else self._serving & self._leased
        return there - self._avoided.keys() or there

    def fate(self, replica: str) -> str:
        """Why a replica's work does not go on, as far as is known; empty where it does.

        Serve knows of a death before its lease ends, but does not tell it from a replica that drains.
        """
        if self._serving and replica not in self._serving:
            return DRAINED
        if self._leased is None or replica in self._leased:
            return ""
        return AWAY if replica in self._unblamed else HUNG

    def _lose(self, replicas: frozenset[str], cause: str) -> None:
        if replicas:
            for request_id in [name for name, replica in self._placed.items() if replica in replicas]:
                self.on_loss(request_id, cause)


fleet = Fleet()
"""Of this process: Ray Serve makes the router, so it cannot be handed one.

Ray pickles the router and the deployments by value: reach it as an attribute of this module, or get a copy.
"""
