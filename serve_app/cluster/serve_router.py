"""Ray Serve's request router (an alpha extension point of Ray 2.60): tells `Replicas` which
replicas run, and sends each call to the one that was chosen for it.

Serve pickles this module by value, and during an upgrade sends it to ingresses of other versions as
well. If they cannot load it, Serve no longer tells them which replicas run. Therefore our own
modules are imported only in `initialize_state`, which Serve does not call in those ingresses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

log = logging.getLogger("hermes.router")

OVERRIDDEN = (
    "_select_from_candidate_replicas",
    "_update_running_replicas",
    "choose_replicas",
    "create_replica_wrapper",
    "initialize_state",
    "update_replicas",
)
"""The methods of Serve's router that this one replaces or calls."""


class SessionRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Routes `execute(request_id, epoch, replica, cause)`."""

    ask_again_s = 1.0
    """Pause before the GCS is asked again for a replica, after it did not answer."""
    _news: Sequence[Any] | None = None
    """The running replicas that Serve has told last, until they are known here."""
    _asking: asyncio.Task[None] | None = None

    def initialize_state(self) -> None:
        """Serve calls this once."""
        from serve_app.cluster import replicas

        self._shared = replicas.of(self._deployment_id.name)
        self._by_name: dict[str, ReplicaID] = {}

    def _update_running_replicas(self, running_replicas: Sequence[Any]) -> None:
        """Serve (2.60) calls this on the event loop of all requests, and asks the GCS there for
        every replica that is new to it. A GCS that is busy, or has just restarted, would hold all
        requests meanwhile. So a thread asks, and what is known already is used at once.
        """
        self._news = running_replicas
        known = [info for info in running_replicas if info.replica_id in self._replicas]
        super()._update_running_replicas(known)
        if len(known) == len(running_replicas):
            self._news = None
        elif self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._ask(), name="new-replicas")

    async def _ask(self) -> None:
        while (news := self._news) is not None:
            unknown = [info for info in news if info.replica_id not in self._replicas]
            try:
                made = await asyncio.to_thread(self._made, unknown)
            except Exception as error:  # whatever Ray raises for a GCS that does not answer
                log.warning("router: cannot ask for %d new replicas: %r", len(unknown), error)
                await asyncio.sleep(self.ask_again_s)
                continue
            if news is self._news:  # otherwise Serve has told others meanwhile
                self._news = None
                known = [self._replicas.get(info.replica_id) for info in news]
                self.update_replicas([*filter(None, known), *made])

    def _made(self, unknown: Sequence[Any]) -> list[RunningReplica]:
        """What Serve needs to call these replicas, without those that are dead already."""
        made = []
        for info in unknown:
            try:
                made.append(self.create_replica_wrapper(info))
            except ValueError as error:  # Serve will tell that it has gone
                log.info("router: %s has gone: %s", info.replica_id, error)
        return made

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve calls this whenever the running replicas change."""
        super().update_replicas(replicas)
        by_name = {replica.replica_id.unique_id: replica.replica_id for replica in replicas}
        if by_name.keys() != self._by_name.keys():
            self._by_name = by_name
            self._shared.serving(by_name)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replica that the call names, or none if Serve says that it does not run."""
        if pending_request is None:
            return []
        # an empty answer must not spin Serve's loop
        pending_request.routing_context.should_backoff = True
        replica_id = self._by_name.get(pending_request.args[2])
        replica = self.curr_replicas.get(replica_id) if replica_id is not None else None
        return [[replica]] if replica is not None else []

    async def _select_from_candidate_replicas(
        self, candidates: list[RunningReplica], backoff_index: int
    ) -> RunningReplica | None:
        # Serve would ask the replica for its queue length (one call whenever its cache is 10 s
        # old); but its capacity is known: dispatchers start no more than the workers publish.
        return self.curr_replicas.get(candidates[0].replica_id)
