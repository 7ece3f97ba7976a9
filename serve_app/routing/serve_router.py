"""The ring as Ray Serve's request router (Ray 2.60's alpha extension point): the only Ray in `routing`.

Serve pickles this module by value. What it shares with the rest of the process it must therefore reach through a
module (`of_process.fleet`): an object imported by its name would be a copy.
"""

from __future__ import annotations

from collections import Counter

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from serve_app.routing import fleet as of_process
from serve_app.routing.ring import HashRing, choose


class SessionRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Routes `execute(request_id, epoch, session, cause)` by its session; counts what this process sends itself.

    Each ingress has one, so summed over ingresses the load bound holds plus at most one request for each.
    """

    def initialize_state(self, load_factor: float, virtual_nodes: int, room: int) -> None:
        """Called by Serve with `request_router_kwargs`. `room`: of one replica, this process's share of it."""
        self._load_factor = load_factor
        self._room = room
        self._virtual_nodes = virtual_nodes
        self._ring = HashRing((), virtual_nodes)
        self._version = of_process.fleet.version
        self._by_name: dict[str, ReplicaID] = {}
        self._routed: dict[str, str] = {}
        self._loads: Counter[str] = Counter()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve whenever the running replicas change."""
        super().update_replicas(replicas)
        by_name = {replica.replica_id.unique_id: replica.replica_id for replica in replicas}
        if by_name.keys() != self._by_name.keys():
            self._by_name = by_name
            of_process.fleet.serving(by_name)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One replica: the ring's choice under the load bound."""
        if pending_request is None:
            return []
        pending_request.routing_context.should_backoff = True  # an empty answer must not spin Serve's loop
        if self._version != of_process.fleet.version:
            self._version = of_process.fleet.version
            self._ring = HashRing(of_process.fleet.able(), self._virtual_nodes)
        if not self._ring.nodes:
            return []
        request_id, session = pending_request.args[0], pending_request.args[2]
        internal_id = pending_request.metadata.internal_request_id
        self._release(internal_id)  # routed again: the replica before did not take it
        name = choose(self._ring, session or request_id, self._loads, self._load_factor, self._room)
        replica = next((r for r in candidate_replicas if r.replica_id == self._by_name[name]), None)
        if replica is None:
            return []
        self._routed[internal_id] = name
        self._loads[name] += 1
        of_process.fleet.place(request_id, name)
        return [[replica]]

    async def _select_from_candidate_replicas(
        self, candidates: list[RunningReplica], backoff_index: int
    ) -> RunningReplica | None:
        # Serve would ask the replica for its queue length (a call each time its cache is 10 s old); room is
        # already known: dispatchers claim no more than the workers publish.
        return self.curr_replicas.get(candidates[0].replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Serve exactly once for every request that was sent."""
        self._release(internal_request_id)

    def _release(self, internal_id: str) -> None:
        name = self._routed.pop(internal_id, None)
        if name is not None:
            self._loads[name] -= 1
            if self._loads[name] <= 0:
                del self._loads[name]
