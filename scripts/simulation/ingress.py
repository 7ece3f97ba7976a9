"""An ingress in virtual time: a live dispatcher and placement, and attempts at modelled engines."""

import asyncio
from typing import TYPE_CHECKING, Any

from serve_app import timings
from serve_app.clock import RedisClock
from serve_app.cluster.replicas import Replicas
from serve_app.contract import Written
from serve_app.dispatch.dispatcher import Dispatcher
from serve_app.dispatch.waits import Waits, WhyItWaits
from serve_app.loops import backoff
from serve_app.policy.order import DEFAULT_RULES
from serve_app.policy.placement import Placement
from serve_app.request_queue.entry import QueueEntry

from .engine import EngineStopped
from .policies import POLICIES
from .virtual_time import VirtualClock
from .work import Record

if TYPE_CHECKING:
    from .service import VirtualService

_CLUSTER = "session-1"


class VirtualIngress:
    """One ingress process: its dispatcher, and its view of the replicas."""

    def __init__(self, service: "VirtualService", name: str, policy: str) -> None:
        cluster = service.cluster
        self._service = service
        self._loop = asyncio.get_running_loop()
        self.name = name
        self.replicas = Replicas()
        self.waits = WhyItWaits()
        self._version = -1
        self._placement = Placement(
            cluster.load_factor, cluster.virtual_nodes, cluster.max_running_requests
        )
        clock = RedisClock(VirtualClock(self._loop))
        # The queue, the abandoned claims and the attempts are those of this file.
        queue: Any = service.queue
        this: Any = self
        rules = DEFAULT_RULES._replace(engine_slots=cluster.max_running_requests)
        self.dispatcher = Dispatcher(
            queue, this, this, self.replicas, name, _CLUSTER, clock, rules=rules
        )
        if policy != "hermes":
            self.dispatcher._scheduler = POLICIES[policy](service.records)

    async def take_over(self, *_: object) -> list[QueueEntry]:
        """As `AbandonedClaims.take_over`: nothing is ever lost in this queue."""
        return []

    async def run(self, entry: QueueEntry) -> Written | None:
        """As `Attempts.run`: attend to a request until it has ended."""
        record = self._service.records[entry.request_id]
        now_s = self._loop.time()
        record.starts(now_s)
        if record.arrived_s + record.work.deadline_s <= now_s:
            record.expired = True
            self._service.ended(record)
            return None
        refused = 0
        while not await self._attempt(entry, record):
            refused += 1
            self.waits.now(entry.key, entry.request_id, Waits.AGAIN, self._loop.time())
            await asyncio.sleep(backoff(timings.ATTEMPT_REFUSED_S, refused))
            self.waits.over(entry.key)
        self._service.ended(record)
        return Written(record.tokens, prompt_tokens=record.work.prompt_tokens)

    async def _attempt(self, entry: QueueEntry, record: Record) -> bool:
        """Returns whether the request has all of its tokens."""
        if self._version != self.replicas.version:
            self._version = self.replicas.version
            self._placement.rebuild(self.replicas.able())
        try:
            name = self._placement.choose(entry.session or entry.request_id)
        except LookupError:
            return False
        record.attempts += 1
        record.engine = name
        self._placement.began(entry.request_id, name)
        self.replicas.place(entry.request_id, name)
        try:
            await self._service.generate(record, name)
            return True
        except EngineStopped:
            self.replicas.avoid(entry.request_id, self._loop.time())
            return False
        finally:
            self._placement.ended(entry.request_id)
            self.replicas.release(entry.request_id)
