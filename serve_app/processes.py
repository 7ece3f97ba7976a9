"""Builds, starts and stops the parts of one process: an ingress or a worker."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from serve_app import timings
from serve_app.admission.admission import Admission
from serve_app.admission.limits import AdmissionLimits, TenantLimits
from serve_app.batches.check import Checks
from serve_app.batches.job import BatchParts
from serve_app.batches.leading import Leading
from serve_app.batches.line_requests import LineRequests
from serve_app.batches.record import Batches
from serve_app.batches.runner import BatchRunner
from serve_app.cluster.direct_calls import CallServer, DirectCalls
from serve_app.cluster.entrance import Entrance
from serve_app.cluster.key_notices import KeyNotices
from serve_app.cluster.leases import Membership
from serve_app.cluster.members import Members
from serve_app.cluster.replicas import Replicas
from serve_app.contract import Execute, IngressLease
from serve_app.dispatch.attempts import Attempts
from serve_app.dispatch.dispatcher import Dispatcher
from serve_app.dispatch.unserved import Unserved
from serve_app.files.files import Files
from serve_app.files.storage import Storage
from serve_app.foundation import Foundation
from serve_app.ingress import (
    batches_api,
    files_api,
    objects_api,
    operator_api,
    status,
    webhooks_api,
)
from serve_app.ingress.api_keys import ApiKeys
from serve_app.ingress.app import Guard, with_cors
from serve_app.ingress.batches_api import BatchCreation
from serve_app.ingress.client_connections import SlowReaders
from serve_app.ingress.connection_limits import ConnectionLimits, Uploads
from serve_app.ingress.conversations import Conversations
from serve_app.ingress.disconnects import Disconnects
from serve_app.ingress.exchange import ExchangeParts, Exchanges
from serve_app.ingress.followers import Followers
from serve_app.ingress.inference import InferenceEndpoint, Submissions
from serve_app.ingress.operator_api import Capacity
from serve_app.ingress.status import MetricsPage, Readiness
from serve_app.ingress.validation.bodies import Validator
from serve_app.observability.ingress_metrics import BatchTelemetry, OrderTelemetry, TenantTelemetry
from serve_app.policy.classes import ClassRules
from serve_app.policy.order import Rules
from serve_app.policy.overload import Overload, OverloadRules
from serve_app.policy.placement import Placement
from serve_app.policy.tenant_lines import TenantRules
from serve_app.redis.check import RedisWatch
from serve_app.redis.link import RedisLink
from serve_app.request_queue import QueueDepths, RequestQueue
from serve_app.requests.dead_letters import DeadLetters
from serve_app.requests.deadlines import Deadlines
from serve_app.requests.endings import Endings
from serve_app.settings import Settings
from serve_app.webhooks.outbox import Outbox
from serve_app.webhooks.sender import Sender
from workers.engine import Engine
from workers.journal_writer import JournalWriter
from workers.loop_watch import LoopWatch
from workers.replica import WorkerReplica
from workers.simulated_engine import SimulatedEngine
from workers.vllm_engine import VllmEngine

log = logging.getLogger("hermes.worker")


class IngressProcess:
    """HTTP, admission and dispatch of one ingress, which calls workers through Ray by `execute`."""

    def __init__(
        self,
        settings: Settings,
        ingress_id: str,
        cluster: str,
        execute: Execute,
        replicas: Replicas,
    ) -> None:
        self.settings = settings
        self._id = ingress_id
        self._me = IngressLease(ingress_id, cluster, model=settings.model.name)
        self._replicas = replicas
        replicas.placement = Placement(**settings.routing.model_dump())
        self.base = base = Foundation(settings, "hermes-ingress", ingress_id)
        self.endings = Endings(settings, base.link, base.store, base.telemetry)
        self.redis_watch = RedisWatch(
            settings.redis,
            settings.namespace,
            settings.ingress.max_body_bytes,
            base.loops,
            base.link.try_again,
        )
        self.entrance = Entrance(settings.namespace, settings.service, cluster, settings.model.name)
        notices = KeyNotices(settings.namespace)
        self.membership = Membership(
            base.lease_link, settings.namespace, self._on_members, base.clock, base.loops, notices
        )
        self._dead = DeadLetters(base.link, settings.namespace, settings.queue.dead_letters)
        self.queue = RequestQueue(
            base.link, settings.namespace, settings.model.name, self._dead, ingress_id
        )
        self._depths = QueueDepths(self.queue, base.clock)
        self.followers = Followers(settings, base.store, ingress_id, base.loops)
        self.api_keys = ApiKeys(
            settings.auth, base.clock.now_s, settings.order.tenant_weights, notices
        )
        self.tenants = TenantTelemetry(base.telemetry.registry)
        valid = base.telemetry.of("hermes_policy_valid")
        valid.set_function(lambda: float(self.api_keys.valid))
        self.calls = DirectCalls(
            replicas, execute, self.followers.channel, self.followers.on_message
        )
        self.overload = Overload(
            OverloadRules(settings.queue.async_above_s, retry_after_s=timings.RETRY_AFTER_S),
            self.api_keys.weights,
        )
        self.dispatcher = self._build_dispatcher(self.calls.execute)
        self._deadlines = Deadlines(base.link, settings.namespace, self.endings, base.loops)
        self._unserved = Unserved(base, self.endings, self.entrance, self._members)
        self.followers.on_end = self.dispatcher.on_end
        self._disconnects = Disconnects(
            base, self.followers, ingress_id, self._members, self.endings
        )
        self.limits = AdmissionLimits(settings, self.overload, self.dispatcher.expected)
        self.dispatcher.unclaimed = lambda: self.limits.unclaimed
        self.connections = ConnectionLimits(settings)
        self.exchanges = self._build_exchanges()
        self.submissions = Submissions(settings, self.followers.channel, base.clock, self.overload)
        self.slow_readers = SlowReaders(settings.ingress.stalled_client_timeout_s, base.loops)
        self.uploads = Uploads(settings)
        self.files = files_of(base)
        self._validator = Validator(
            settings, lambda many: base.telemetry.count("hermes_ignored_fields", by=many)
        )
        self.batches = Batches(base.link, settings, base.clock)
        self.batch_runner = self._build_batch_runner()
        self.readiness = Readiness(
            base,
            self._me,
            self.membership,
            self.entrance,
            replicas,
            self.redis_watch,
            self.limits.memory,
        )
        self._news_link = RedisLink(settings.redis)
        self.outbox = Outbox(settings, base.link, self._news_link, base.clock)
        self._webhooks = Sender(
            settings.webhooks, self.outbox, base.clock, base.loops, base.telemetry
        )
        self.metrics = MetricsPage(base, self.membership, self._depths, self.limits)

    def _build_dispatcher(self, execute: Execute) -> Dispatcher:
        base, replicas = self.base, self._replicas
        attempts = Attempts(base, self.endings, self.queue, self._dead, replicas, execute)
        return Dispatcher(
            self.queue,
            self._depths,
            attempts,
            replicas,
            self._me,
            base.clock,
            base.loops,
            OrderTelemetry(base.telemetry.registry, self.tenants),
            order_rules(self.settings, self.api_keys.weights),
            self.overload,
        )

    def _build_exchanges(self) -> Exchanges:
        base, settings = self.base, self.settings
        of_tenants = TenantLimits(self.dispatcher.output_tokens)
        admission = Admission(base, self.limits, self._disconnects.unsure, of_tenants, self.tenants)
        heartbeat_s, unread = settings.ingress.heartbeat_s, self.connections.unread
        parts = ExchangeParts(self._disconnects, heartbeat_s, unread)
        within_s = settings.redis.admission_timeout_s
        return Exchanges(admission, self.followers, parts, self.redis_watch, within_s)

    def _build_batch_runner(self) -> BatchRunner | None:
        if self.files is None:
            return None
        base, settings, storage = self.base, self.settings, self.files.storage
        tenant = self.api_keys.known
        requests = LineRequests(
            settings,
            self.exchanges,
            self.submissions,
            self._validator,
            self.endings,
            base.link,
            base.store,
            tenant,
        )
        checks = Checks(storage, self._validator, settings.ingress.max_body_bytes, tenant)
        leading = Leading(base.link, RedisLink(settings.redis), settings, base.clock)
        shared = leading, storage, self.files, checks, requests, base.clock
        parts = BatchParts(*shared, BatchTelemetry(base.telemetry.registry))
        return BatchRunner(
            parts,
            base.loops,
            self._answers,
            self._slots,
            settings.batches.max_in_flight,
            lambda: self.entrance.unserved,
        )

    def _answers(self) -> bool:
        """Whether new requests are answered here, and not by a newer Ray cluster."""
        return self.entrance.let_in and not self._members().newer(self._me)

    def _slots(self) -> int:
        return sum(one.capacity for one in self._replicas.mine(self._members().workers))

    def app(self) -> Any:
        base, settings = self.base, self.settings
        inference = InferenceEndpoint(
            self.uploads,
            self._validator,
            Conversations(
                base.store, settings.ingress.max_body_bytes, settings.redis.admission_timeout_s
            ),
            self.submissions,
            self.exchanges,
            base.tracing,
        )
        readers = objects_api.Readers(self.exchanges, self.connections)
        routers = [
            status.routes(
                self._id,
                settings.model,
                lambda: self._validator.most_tokens,
                self.readiness,
                self.metrics,
            ),
            objects_api.request_routes(base.store, self.endings, readers),
            objects_api.response_routes(base.store, self.endings, readers),
            objects_api.chat_routes(base.store, readers, self.uploads, settings.limits),
            operator_api.usage_routes(settings.namespace, base.link, base.clock, readers),
            operator_api.capacity_routes(
                Capacity(self._id, settings.model.name, self.overload, self.limits, self._members)
            ),
            files_api.routes(
                self.files,
                self.uploads,
                self.connections,
                readers,
                base.clock,
                settings.files.max_bytes,
            ),
            batches_api.routes(self._batch_creation(), self.batches, self.uploads, readers),
            operator_api.dead_letter_routes(
                self._dead, readers, self.exchanges, self.submissions.again
            ),
            webhooks_api.routes(self.outbox, readers),
        ]
        guard = Guard(
            settings,
            inference,
            routers,
            self.api_keys,
            self.connections.requests,
            self.slow_readers,
            base.telemetry,
            self.tenants,
            lambda: self.entrance.let_in,
        )
        return with_cors(guard)

    def _batch_creation(self) -> BatchCreation | None:
        if self.files is None:
            return None
        its = self.batches, self.files, self.base.clock, self._validator, self.settings
        return BatchCreation(*its)

    async def start(self) -> None:
        """Start every part; each part waits for Redis if it is unreachable."""
        await self.redis_watch.start()
        await self.followers.start()
        await self._disconnects.start()
        await self.slow_readers.start()
        await self._deadlines.start()
        await self._unserved.start()
        await self.dispatcher.start()
        await self._webhooks.start()
        await self.membership.join_as_ingress(
            lambda: self.dispatcher.lease(
                self.readiness.all_replicas_there(), sum(self.limits.unclaimed.values())
            ),
            self.entrance,
        )
        await self.base.start()
        if self.files is not None:
            self.base.loops.keep("files", self.files.keep_swept)
        if self.batch_runner is not None:
            await self.batch_runner.start()
        if self.settings.auth.required:
            self.base.loops.keep("api-keys", self.api_keys.watch)
        watch, outputs_bytes = self.limits.watch, self.dispatcher.outputs_bytes
        watching = partial(watch, self._depths, self._ingresses, outputs_bytes)
        self.base.loops.keep("queue-depths", watching)

    async def stop(self) -> None:
        """Stop claiming first, then delete the lease, then close the connections."""
        if self.batch_runner is not None:
            await self.batch_runner.stop()
        await self.dispatcher.stop()
        await self.calls.stop()
        await self.membership.leave()
        await self.exchanges.stop()
        await self._disconnects.stop()
        await self.followers.stop()
        await self._webhooks.stop()
        await self._news_link.close()
        await self.base.stop()
        self._validator.stop()

    def check_health(self) -> None:
        self.base.loops.check_health()

    def _on_members(self, members: Members) -> None:
        if not self.membership.reachable:
            self.redis_watch.lost()
        self.calls.know(members.addresses)
        self.dispatcher.on_members(members)
        mine = {one.name for one in self._replicas.mine(members.workers)}
        longest = [one.max_model_len for one in members.engines if one.name in mine]
        self._validator.most_tokens = max(longest, default=0) if len(longest) == len(mine) else 0
        self.base.telemetry.set("hermes_engines_ready", len(mine))
        self.limits.memory.workers = len(mine)
        self.base.telemetry.called(self._replicas.calls)
        self.tenants.show_limits(self.base.clock.now_ms())

    def _members(self) -> Members:
        return self.membership.members

    def _ingresses(self) -> tuple[int, int]:
        members = self._members()
        return len(members.of(self._me.model).ingresses), len(members.ingresses)


def files_of(base: Foundation) -> Files | None:
    """The files of a service; None if it has no storage."""
    settings = base.settings
    where = settings.files.storage.rstrip("/")
    if not where:
        return None
    return Files(base.link, base.clock, settings, Storage(f"{where}/{settings.namespace}"))


def order_rules(settings: Settings, weights: Mapping[str, float]) -> Rules:
    """`weights`: of tenants; they may change at any time."""
    order = settings.order
    shares = order.interactive_share, order.ageing_s, order.aged_share, order.interactive_credit
    return Rules(
        ClassRules(*shares),
        TenantRules(weights, order.prompt_weight, order.output_weight),
        order.claim_ahead,
        order.short_first_ms_per_cost,
        settings.workers.max_running_requests,
    )


def make_engine(settings: Settings) -> Engine:
    if settings.engine.kind == "simulated":
        return SimulatedEngine(settings)
    return VllmEngine(settings)


def most_calls(settings: Settings) -> int:
    """The most calls of a worker at a time. Dispatchers normally send no more than the capacity;
    this limit must not reject what they send.
    """
    return 2 * settings.workers.max_running_requests


class WorkerProcess:
    """One engine, and the replica that uses it. It takes calls at the address `host`; if that is
    empty, only Ray calls it.
    """

    def __init__(
        self, settings: Settings, name: str, cluster: str, engine: Engine, host: str = ""
    ) -> None:
        self._name, self._host = name, host
        self._base = base = Foundation(settings, "hermes-worker", name)
        self._engine = engine
        self._writer = JournalWriter(settings, base.loops)
        engine.progress.on_step = self._writer.pause.stepped
        kept = base.telemetry.of("hermes_journal_buffer_bytes")
        kept.set_function(lambda: self._writer.kept_bytes)
        self._loop_watch = LoopWatch(settings.workers.max_event_loop_block_s, base.telemetry)
        self.replica = WorkerReplica(
            name,
            cluster,
            engine,
            self._loop_watch,
            Membership(base.lease_link, settings.namespace, clock=base.clock, loops=base.loops),
            self._writer,
            base,
        )
        self._calls = CallServer(self.replica.begin, most_calls(settings))
        self._writer.send_wakes = self._calls.send_wakes

    async def start(self) -> None:
        """Load the engine, then join: dispatchers count its capacity only from then on."""
        began_s = self._base.clock.local.monotonic_s()
        await self._engine.start()
        await self._writer.start()
        address = await self._calls.start(self._name, self._host) if self._host else None
        await self.replica.join(address)
        await self._base.start()
        self._loop_watch.start()
        took_s = self._base.clock.local.monotonic_s() - began_s
        log.info("engine %s ready after %.1f s", self._engine.name, took_s)

    async def stop(self) -> None:
        self._loop_watch.stop()
        await self.replica.leave()
        await self._calls.stop()
        await self._writer.stop()
        await self._engine.stop()
        await self._base.stop()
