"""Whether a request sent now would be accepted and worked on."""

from __future__ import annotations

from collections.abc import Mapping

from serve_app.admission.memory_limit import MemoryLimit
from serve_app.cluster.leases import Membership
from serve_app.cluster.replicas import Replicas
from serve_app.loops import Loops
from serve_app.redis.check import RedisWatch
from serve_app.settings import Settings


class Readiness:
    """What one ingress knows of its own loops, of Redis, and of the replicas of its Ray cluster."""

    def __init__(
        self,
        settings: Settings,
        cluster: str,
        membership: Membership,
        replicas: Replicas,
        loops: Loops,
        redis: RedisWatch,
        memory: MemoryLimit,
    ) -> None:
        self._workers_wanted = settings.workers.wanted
        self._ingresses_wanted = settings.ingress.replicas
        self._cluster = cluster
        self._membership = membership
        self._replicas = replicas
        self._loops = loops
        self._redis = redis
        self._memory = memory

    def all_replicas_there(self) -> bool:
        """Whether all replicas that this Ray cluster is meant to have are present."""
        return (
            self._workers() >= self._workers_wanted and self._ingresses() >= self._ingresses_wanted
        )

    def report(self) -> tuple[bool, Mapping[str, object]]:
        """Whether this ingress is ready, and as JSON why not."""
        workers = self._workers()
        problem = self._problem(workers)
        return problem is None, {
            "ready": problem is None,
            "problem": problem,
            "warnings": [*self._redis.warnings, *self._memory.warnings],
            "workers": workers,
            "workers_wanted": self._workers_wanted,
            "ingresses": self._ingresses(),
            "ingresses_wanted": self._ingresses_wanted,
        }

    def _problem(self, workers: int) -> str | None:
        if failing := self._loops.failing:
            return f"background loops of this process keep ending: {', '.join(failing)}"
        if self._redis.refused:
            return f"Redis cannot be used: {self._redis.refused}"
        if not self._membership.reachable or not self._redis.usable:
            return "the journal (Redis) cannot be reached"
        return None if workers else "no worker has its engine ready yet"

    def _workers(self) -> int:
        return len(self._replicas.mine(self._membership.members.workers))

    def _ingresses(self) -> int:
        return self._membership.members.ingresses_of(self._cluster)
