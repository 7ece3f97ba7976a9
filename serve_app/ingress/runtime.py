"""The parts of one ingress process, started and stopped together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from serve_app.attempts import Execute
from serve_app.carrier import Carrier
from serve_app.deadlines import Deadlines
from serve_app.dispatcher import Dispatcher
from serve_app.errors import JournalUnavailable
from serve_app.ingress.admission import Admission
from serve_app.ingress.checks import Checks
from serve_app.ingress.departures import Departures
from serve_app.ingress.keys import Keys
from serve_app.ingress.metrics_page import MetricsPage
from serve_app.ingress.readers import Readers
from serve_app.ingress.waiting_room import WaitingRoom
from serve_app.journal.client import connect_redis
from serve_app.journal.connection import RedisLink
from serve_app.journal.durability import Durability
from serve_app.journal.hub import FollowerHub
from serve_app.journal.keyed import KeyedRequests
from serve_app.journal.store import JournalStore
from serve_app.logs import configure_logging
from serve_app.loops import Loops, jittered
from serve_app.membership import STEADY_S, Members, Membership
from serve_app.redis_clock import RedisClock
from serve_app.request_queue.dead_letters import DeadLetters
from serve_app.request_queue.overdue import Waiting
from serve_app.request_queue.queue import Depth, RequestQueue
from serve_app.request_queue.suspects import Suspects
from serve_app.routing.fleet import Fleet
from serve_app.scheduling.order import CLASSES
from serve_app.settings import Settings
from serve_app.snapshots import Snapshots
from serve_app.storage import Storage
from serve_app.telemetry import Telemetry, merge_pages, queue_gauges
from serve_app.tracing import Tracing

log = logging.getLogger("hermes.ingress")

_DEPTHS_S = 0.5


class Ingress:
    """Everything that one ingress replica holds. `cluster`: the name of its Ray cluster, see `Membership`."""

    def __init__(self, settings: Settings, ingress_id: str, cluster: str, execute: Execute, fleet: Fleet) -> None:
        configure_logging(settings.telemetry, ingress_id)
        self.settings = settings
        self.id = ingress_id
        self._cluster = cluster
        self.telemetry = Telemetry()
        self.loops = Loops(self.telemetry)
        self.tracing = Tracing(settings.telemetry, "hermes-ingress", ingress_id)
        self.keys = Keys(settings.auth)
        self.checks = Checks(settings)
        self._fleet = fleet
        self.redis = connect_redis(settings.redis)
        self._link = RedisLink(settings.redis)
        self.clock = RedisClock()
        self.store = JournalStore(settings, self._link, self.clock)
        self.hub = FollowerHub(settings, self.store, ingress_id, self.loops)
        dead = DeadLetters(self._link, settings.namespace, settings.queue.dead_letters)
        self.queue = RequestQueue(
            self.redis, self._link, settings.namespace, settings.model.name, ingress_id, self.clock, dead
        )
        self.departures = Departures(
            settings, self.redis, self.store, self.hub, ingress_id, self.telemetry, self.clock, self.loops
        )
        self.readers = Readers(settings, self.loops)
        self.metrics = MetricsPage(self._metrics_page, settings.telemetry.page_period_s)
        self.storage = Storage(settings)
        self.waiting_room = WaitingRoom(settings)
        keyed = KeyedRequests(settings, self.store, self._link)
        self.admission = Admission(
            settings, self.store, keyed, self.queue, self.hub, self.departures, self.telemetry, self.clock,
            self.storage, self.waiting_room,
        )  # fmt: skip
        waiting = Waiting(self.redis, [self.queue.stream(name) for name in CLASSES])
        self.deadlines = Deadlines(self.store, waiting, self.clock, self.telemetry, self.loops)
        suspects = Suspects(self.redis, settings.namespace)
        carrier = Carrier(
            self.store,
            self.queue,
            dead,
            suspects,
            fleet,
            execute,
            self.telemetry,
            self.tracing,
            self.clock,
            settings.queue.poison_after,
        )
        self.dispatcher = Dispatcher(self.queue, carrier, fleet, cluster, self.loops)
        self._lease_redis = connect_redis(
            settings.redis, STEADY_S
        )  # of its own: bulk traffic must not hold up the leases
        self.membership = Membership(self._lease_redis, settings.namespace, self._on_members, self.clock, self.loops)
        self._snapshots = Snapshots(
            self.redis, settings.namespace, ingress_id, self.telemetry, settings.telemetry.snapshot_period_s,
            self.loops,
        )  # fmt: skip
        self._watches: list[asyncio.Task[None]] = []
        self._durability = Durability(self.redis, settings.namespace, self.telemetry)

    async def start(self) -> None:
        """Start every part; a Redis that is away is waited for by each of them."""
        await self.hub.start()
        await self.departures.start()
        await self.readers.start()
        await self.deadlines.start()
        await self.dispatcher.start()
        await self.membership.join_as_ingress(self.id, self._cluster, self._whole)
        await self._snapshots.start()
        self._watches = [
            self.loops.keep("queue-depths", self._watch_depths),
            self.loops.keep("durability", self._durability.keep_looking),
        ]
        if self.settings.telemetry.process_port:
            port = self.telemetry.serve_page(self.settings.telemetry.process_port)
            log.info("metrics of this process on port %d", port)

    async def stop(self) -> None:
        """Stop claiming first, give the lease back, then let go of the connections."""
        await self.dispatcher.stop()
        await self.membership.leave()
        await self.loops.end(*self._watches)
        await self._snapshots.stop()
        await self.readers.stop()
        await self.departures.stop()
        await self.deadlines.stop()
        await self.hub.stop()
        await self._link.close()
        await self._lease_redis.aclose()
        await self.redis.aclose()
        await self.tracing.stop()
        self.checks.stop()

    def _on_members(self, members: Members) -> None:
        self.dispatcher.on_members(members)
        self.telemetry.engines_ready(len(self._fleet.mine(members.workers)))

    async def _watch_depths(self) -> None:
        while True:
            try:
                self.storage.looking()
                depths, memory = await self.queue.look()
                ingresses = len(self.membership.members.ingresses)
                self.admission.on_depths(depths)
                self.storage.told(memory, ingresses)
                self.waiting_room.divide(ingresses, self.storage.room_bytes)
            except JournalUnavailable as error:
                log.debug("queue depths unknown: %s", error)
            await asyncio.sleep(jittered(_DEPTHS_S))

    def _whole(self) -> bool:
        """Whether all replicas are there that this Ray cluster is to have."""
        members, wanted = self.membership.members, self.settings
        return (
            len(self._fleet.mine(members.workers)) >= wanted.workers.wanted
            and members.ingresses_of(self._cluster) >= wanted.ingress.replicas
        )

    async def readiness(self) -> tuple[bool, Mapping[str, object]]:
        """Whether a request sent now would be accepted and worked on, and why not."""
        members = self.membership.members
        workers = len(self._fleet.mine(members.workers))
        failing = self.loops.failing
        ready = self.membership.reachable and workers > 0 and not failing
        problem = None
        if failing:
            problem = f"background loops of this process do not stay up: {', '.join(failing)}"
        elif not self.membership.reachable:
            problem = "the journal (Redis) cannot be reached"
        elif workers == 0:
            problem = "no worker has its engine ready yet"
        return ready, {
            "ready": ready,
            "problem": problem,
            "warnings": [text for text in (self._durability.problem, *self.storage.warnings) if text],
            "workers": workers,
            "workers_wanted": self.settings.workers.wanted,
            "ingresses": members.ingresses_of(self._cluster),
            "ingresses_wanted": self.settings.ingress.replicas,
        }

    async def _metrics_page(self) -> bytes:
        """The application's metrics: one page, each sample labelled with its replica."""
        members = self.membership.members
        pages = await self._snapshots.pages([*members.names, *(name for name, _ in members.workers)])
        bounds = self.settings.queue.max_waiting
        try:
            depths: Mapping[str, Depth] = await self.queue.depths()
        except JournalUnavailable:
            depths = {}
        gauges = {
            name: (depths[name].waiting, depths[name].claimed, bounds(name), depths[name].oldest_s)
            for name in CLASSES
            if name in depths
        }
        memory = self.storage.memory
        redis_bytes = (memory.used_bytes, memory.limit_bytes) if memory is not None else None
        return await asyncio.to_thread(merge_pages, pages, queue_gauges(gauges, redis_bytes))
