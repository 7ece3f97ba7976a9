"""Which replicas of a deployment can take work, and which request was sent to which replica. Pure.

It combines two views: Ray Serve's set of running replicas (a draining replica has left it, but
still works) and the workers' leases (a replica that hangs or has a sick engine has lost its lease,
but Serve still sends to it).

Serve's router and `DirectCalls` choose by the same `Placement`, which counts the calls of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeVar

from serve_app import timings
from serve_app.contract import Cause
from serve_app.policy.placement import Placement


class Named(Protocol):
    """What a worker has told: its lease, for one."""

    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Named)


class Replicas:
    """The replicas of one engine deployment, as this process sees them."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[str, Cause], None]] = []
        self._serving: frozenset[str] = frozenset()
        self._leased: frozenset[str] | None = None
        self._unblamed: frozenset[str] = frozenset()
        self._placed: dict[str, str] = {}
        self._sequences: dict[str, int] = {}
        self._avoided: dict[str, float] = {}
        self._broken: set[str] = set()
        """Replicas to which this process has lost its connection."""
        self.slots: Mapping[str, int] = {}
        """Of each replica, those that calls from this process may take."""
        self._placement: Placement | None = None
        self._placed_version = -1
        self.version = 0
        self.calls = {True: 0, False: 0}
        """How many were sent to the replica that holds their session's cache, and how many to
        another because that one was full.
        """

    def listen(self, listener: Callable[[str, Cause], None]) -> None:
        """Call `listener(request_id, cause)` for every request whose replica has left one of the
        views.
        """
        self._listeners.append(listener)

    def starts(self, request_id: str, sequences: int) -> None:
        """A request will be sent to a replica, whose engine runs so many sequences for it."""
        self._sequences[request_id] = sequences

    def ended(self, request_id: str) -> None:
        self._sequences.pop(request_id, None)

    def sequences(self, request_id: str) -> int:
        """How many sequences an engine runs for a request."""
        return self._sequences.get(request_id, 1)

    def place(self, request_id: str, replica: str) -> None:
        self._placed[request_id] = replica

    def place_by(self, placement: Placement) -> None:
        """Choose by this from now on; the router that Serve makes calls it."""
        self._placement, self._placed_version = placement, -1

    def choose(self, key: str, request_id: str) -> str:
        """The replica for a call.

        Args:
            key: of the session.

        Raises:
            LookupError: none can take work, or Serve has not told of any yet.
        """
        if self._placement is None:
            raise LookupError("no router")
        if self._placed_version != self.version:
            self._placed_version = self.version
            self._placement.rebuild(self.able())
        self._placement.slots = self.slots
        return self._placement.choose(key, self.sequences(request_id))

    def sent(self, call_id: str, key: str, request_id: str, replica: str) -> None:
        """A call is being sent to the replica that was chosen for it."""
        assert self._placement is not None
        self._placement.began(call_id, replica, self.sequences(request_id))
        self.place(request_id, replica)
        self.calls[replica == self._placement.home(key)] += 1

    def returned(self, call_id: str) -> None:
        """A call has ended, or is sent again. A second call changes nothing."""
        if self._placement is not None:
            self._placement.ended(call_id)

    def release(self, request_id: str) -> None:
        """Nobody waits for the request's replica any more."""
        self._placed.pop(request_id, None)

    def avoid(self, request_id: str, now_s: float) -> None:
        """A call to this request's replica failed. It may be dead although neither Serve nor its
        lease shows it yet.
        """
        replica = self._placed.get(request_id)
        if replica is not None:
            self._avoided[replica] = now_s + timings.REPLICA_AVOID_S
            self.version += 1

    def connected(self, replica: str) -> None:
        """There is a connection to a replica."""
        self._broken.discard(replica)
        self.version += 1

    def disconnected(self, replica: str) -> None:
        """The connection to a replica broke, which is how the death of its process shows first."""
        self._broken.add(replica)
        self.version += 1

    def forgive(self, now_s: float) -> None:
        """Use replicas again that have been avoided for long enough."""
        over = [replica for replica, until_s in self._avoided.items() if until_s <= now_s]
        for replica in over:
            del self._avoided[replica]
            self.version += 1

    def serving(self, replicas: Iterable[str]) -> None:
        """Ray Serve's running replicas have changed."""
        now = frozenset(replicas)
        self._broken &= now
        left, self._serving = self._serving - now, now
        self.version += 1
        self._lose(left, Cause.DRAINED)

    def leased(self, replicas: Iterable[str] | None) -> None:
        """The workers that hold a lease; None if unknown, such as while Redis is unreachable."""
        now = None if replicas is None else frozenset(replicas)
        if now == self._leased:
            return
        before, self._leased = self._leased, now
        self.version += 1
        if now is None:
            return
        missing = frozenset(self._placed.values()) - now
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
        return there - self._avoided.keys() - self._broken or there

    def fate(self, replica: str) -> Cause | None:
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
        if not replicas:
            return
        for request_id in [name for name, at in self._placed.items() if at in replicas]:
            for listener in self._listeners:
                listener(request_id, cause)


_of_process: dict[str, Replicas] = {}


def of(deployment: str) -> Replicas:
    """The replicas of a deployment, by its name; all callers in this process share one object.

    Ray Serve creates the router, so the object cannot be passed to it. Serve also pickles the
    router's module by value. Therefore call this through the module (`replicas.of`); a function
    imported by name might be a copy.
    """
    return _of_process.setdefault(deployment, Replicas())
