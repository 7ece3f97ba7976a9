"""Who is alive, as one reading of the leases says, and what may be concluded from it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from serve_app import timings
from serve_app.contract import EngineReport, IngressLease, WorkerAddress, WorkerLease

_TOLD_AT_MOST = 4
"""Other Ray clusters of which `Members.beside` tells; there is hardly ever more than one."""


@dataclass(frozen=True, slots=True)
class Members:
    """One reading of the leases."""

    ingresses: tuple[IngressLease, ...] = ()
    workers: tuple[WorkerLease, ...] = ()
    trusted: bool = False
    """Whether a process that is not `living` is dead. A Redis that was unreachable or slow also
    prevents renewals.
    """
    lately: frozenset[str] = frozenset()
    """Processes that are missing now, but had a lease a moment ago, while readings are slow."""
    engines: tuple[EngineReport, ...] = ()
    """What the workers' engines say."""
    addresses: tuple[WorkerAddress, ...] = ()
    """Where the workers take calls."""

    @property
    def living(self) -> frozenset[str]:
        """Ingresses and workers that hold a lease, or may only have been too slow to renew it."""
        return self.lately.union(self.names, (one.name for one in self.workers))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(ingress.name for ingress in self.ingresses)

    def of(self, model: str) -> Members:
        """Only the ingresses and engines of a model: its queues and capacity are theirs alone. The
        workers' leases do not say what they serve; each Ray cluster knows its own.
        """
        ingresses = tuple(one for one in self.ingresses if one.model == model)
        engines = tuple(one for one in self.engines if one.model in ("", model))
        return replace(self, ingresses=ingresses, engines=engines)

    def others(self, me: IngressLease) -> list[IngressLease]:
        """The other ingresses of my Ray cluster that claim from my model's queues."""
        return [
            one
            for one in self.ingresses
            if one.cluster == me.cluster and one.name != me.name and one.model == me.model
        ]

    def newer(self, me: IngressLease) -> str:
        """The Ray cluster that answers in place of mine: the newest complete one, of those that
        serve my model. Empty if it is mine, or none is complete.
        """
        able = {one.cluster for one in self.ingresses if one.complete and one.model == me.model}
        newest = max(able | {me.cluster}, key=self._age)
        return newest if newest != me.cluster else ""

    def _age(self, cluster: str) -> tuple[int, str]:
        """The greater, the younger; by Redis's clock."""
        since_ms = (one.since_ms for one in self.ingresses if one.cluster == cluster)
        return max(since_ms, default=0), cluster

    def beside(self, me: IngressLease) -> list[str]:
        """A sentence about each other Ray cluster in the namespace, at most four: who answers."""
        models = {one.cluster: one.model for one in self.ingresses}
        answers = self.newer(me)
        told = []
        for name in sorted(models.keys() - {me.cluster})[:_TOLD_AT_MOST]:
            if models[name] != me.model:
                what = f"another model, '{models[name]}': each answers its own requests"
            elif answers:
                what = f"this model: {answers} answers new requests, this one only finishes its own"
            elif self.newer(me._replace(cluster=name)) == me.cluster:
                what = "this model: this one answers new requests, that one only finishes its own"
            else:
                what = "this model: both answer until the newer one is complete"
            told.append(f"another Ray cluster, {name}, is in this namespace and serves {what}")
        return told


class Trust:
    """Decides whether a missing lease means death, from how quickly the leases were read
    (docs/adr/0010, 0013). Pure.
    """

    def __init__(self) -> None:
        self._quick_since_s = math.inf
        self._steady_since_s = math.inf
        self._looked_s = -math.inf
        self._seen_s: dict[str, float] = {}

    def failed(self) -> None:
        """Redis did not answer, so nobody can have renewed a lease."""
        self._quick_since_s = self._steady_since_s = math.inf

    def judged(
        self,
        began_s: float,
        now_s: float,
        ingresses: tuple[IngressLease, ...],
        workers: tuple[WorkerLease, ...],
    ) -> Members:
        """A reading that began at `began_s` was answered. After readings that were quick for the
        length of a lease, every living process has renewed its lease, so a missing one is dead at
        once. That does not hold if Redis is slow, or if this process was paused or its machine is
        busy. Then it takes `LEASE_PATIENCE_S` of answered readings, and only a process that was in
        none of them is dead. So the wait ends, however slow the machine is.
        """
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        self._quick_since_s = min(self._quick_since_s, now_s)
        self._steady_since_s = min(self._steady_since_s, now_s)
        if (
            now_s - began_s > timings.LEASE_QUICK_S
            or gap_s > timings.LEASE_RENEW_S + timings.LEASE_QUICK_S
        ):
            self._quick_since_s = now_s
        if now_s - began_s > timings.LEASE_STEADY_S or gap_s > timings.LEASE_PATIENCE_S / 2:
            self._steady_since_s = now_s
        present = [*(ingress.name for ingress in ingresses), *(one.name for one in workers)]
        self._seen_s.update(dict.fromkeys(present, now_s))
        self._seen_s = {
            name: seen_s
            for name, seen_s in self._seen_s.items()
            if now_s - seen_s <= timings.LEASE_PATIENCE_S
        }
        if now_s - self._quick_since_s > timings.LEASE_MS / 1000:
            return Members(ingresses, workers, trusted=True)
        lately = frozenset(self._seen_s).difference(present)
        return Members(
            ingresses, workers, now_s - self._steady_since_s > timings.LEASE_PATIENCE_S, lately
        )
