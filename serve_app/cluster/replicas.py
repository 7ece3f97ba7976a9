"""Which replicas of a deployment can take work, and which of them each call is sent to. Pure.

It combines two views: Ray Serve's set of running replicas (a draining replica has left it, but
still works) and the workers' leases (a replica that hangs or has a sick engine has lost its lease,
but Serve still sends to it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from serve_app import timings
from serve_app.contract import Cause, WorkerAddress, WorkerLease
from serve_app.policy.placement import Placement

T = TypeVar("T", WorkerLease, WorkerAddress)


@dataclass(frozen=True, eq=False, slots=True)
class Placed:
    """A call and its replica, whose engine runs so many sequences for it. `lose` is called if the
    replica leaves one of the views.
    """

    replica: str
    sequences: int
    lose: Callable[[Cause], None]


class Replicas:
    """The replicas of one engine deployment, as this process sees them."""

    def __init__(self) -> None:
        self._serving: frozenset[str] = frozenset()
        self._leased: frozenset[str] | None = None
        self._unblamed: frozenset[str] = frozenset()
        self._placed: set[Placed] = set()
        self._avoided: dict[str, float] = {}
        self._broken: dict[str, float] = {}
        """Replicas to which this process has lost its connection, and until when that counts."""
        self._changed = True
        """Whether the placement does not know yet who is `able`."""
        self.placement = Placement()
        self.calls = {True: 0, False: 0}
        """How many were sent to the replica that holds their session's cache, and how many to
        another because that one was full.
        """

    def place(self, key: str, sequences: int, lose: Callable[[Cause], None]) -> Placed:
        """Choose the replica of a call, which counts as its load until `release`; `key` is that of
        the session. Raises LookupError if none can take work, or Serve has not told of any yet.
        """
        if self._changed:
            self.placement.rebuild(self.able())
            self._changed = False
        replica = self.placement.choose(key, sequences)
        self.placement.count(replica, sequences)
        self._placed.add(placed := Placed(replica, sequences, lose))
        self.calls[replica == self.placement.home(key)] += 1
        return placed

    def release(self, placed: Placed) -> None:
        self._placed.remove(placed)
        self.placement.count(placed.replica, -placed.sequences)

    def avoid(self, replica: str, now_s: float) -> None:
        """A call to this replica failed. It may be dead although neither Serve nor its lease shows
        it yet.
        """
        self._avoided[replica] = now_s + timings.REPLICA_AVOID_S
        self._changed = True

    def connected(self, replica: str) -> None:
        self._broken.pop(replica, None)
        self._changed = True

    def disconnected(self, replica: str) -> None:
        """The connection to a replica broke, which is how the death of its process shows first. If
        it is not opened again, the lease tells.
        """
        self._broken[replica] = math.inf
        self._changed = True

    def unban_expired(self, now_s: float) -> None:
        """Use replicas again that have been avoided for long enough."""
        until_s = now_s + timings.REPLICA_AVOID_S
        self._broken = {replica: min(at_s, until_s) for replica, at_s in self._broken.items()}
        for kept in (self._avoided, self._broken):
            for replica in [replica for replica, at_s in kept.items() if at_s <= now_s]:
                del kept[replica]
                self._changed = True

    def serving(self, replicas: Iterable[str]) -> None:
        now = frozenset(replicas)
        self._broken = {replica: at_s for replica, at_s in self._broken.items() if replica in now}
        gone, self._serving = self._serving - now, now
        self._changed = True
        self._lose(gone, Cause.DRAINED)

    def leased(self, replicas: Iterable[str] | None) -> None:
        """The workers that hold a lease; None if unknown, such as while Redis is unreachable."""
        now = None if replicas is None else frozenset(replicas)
        if now == self._leased:
            return
        before, self._leased = self._leased, now
        self._changed = True
        if now is None:
            return
        missing = frozenset(placed.replica for placed in self._placed) - now
        self._unblamed = (self._unblamed if before is not None else self._serving | missing) - now
        self._lose(missing & self._unblamed, Cause.REDIS_UNREACHABLE)
        self._lose(missing - self._unblamed, Cause.HUNG)

    def mine(self, workers: Iterable[T]) -> list[T]:
        """What this Ray cluster's workers have told, out of all that share the namespace.

        During an upgrade without downtime there are two clusters; the new one must claim nothing
        before its own engines are ready.
        """
        return [one for one in workers if one.name in self._serving]

    def able(self) -> frozenset[str]:
        """Replicas that can take work: leased, running, and without a recent failed call, unless
        calls failed at all of them.
        """
        there = self._serving if self._leased is None else self._serving & self._leased
        return there - self._avoided.keys() - self._broken.keys() or there

    def loss_cause(self, replica: str) -> Cause | None:
        """Why a replica's work does not continue, as far as is known; None if it does.

        Serve knows of a death before the lease expires, but does not distinguish it from draining.
        """
        if self._serving and replica not in self._serving:
            return Cause.DRAINED
        if replica in self._broken:
            return Cause.LOST
        if self._leased is None or replica in self._leased:
            return None
        return Cause.REDIS_UNREACHABLE if replica in self._unblamed else Cause.HUNG

    def _lose(self, replicas: frozenset[str], cause: Cause) -> None:
        for placed in [placed for placed in self._placed if placed.replica in replicas]:
            placed.lose(cause)


_of_process: dict[str, Replicas] = {}


def of(deployment: str) -> Replicas:
    """The replicas of a deployment, by its name; all callers in this process share one object.

    Ray Serve creates the router, so the object cannot be passed to it. Serve also pickles the
    router's module by value. Therefore call this through the module (`replicas.of`); a function
    imported by name might be a copy.
    """
    return _of_process.setdefault(deployment, Replicas())
