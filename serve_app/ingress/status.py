"""Endpoints that the ingress answers by itself: models, health, readiness, metrics."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from serve_app import __version__
from serve_app.admission.limits import AdmissionLimits
from serve_app.admission.memory_limit import MemoryLimit
from serve_app.clock import SYSTEM
from serve_app.cluster.entrance import Entrance
from serve_app.cluster.leases import Membership
from serve_app.cluster.replicas import Replicas
from serve_app.contract import Reason
from serve_app.errors import RedisUnavailable, RequestRefused
from serve_app.journal.store import JournalStore
from serve_app.loops import Loops
from serve_app.observability.metrics_pages import (
    CONTENT_TYPE,
    Snapshots,
    merge_pages,
    queue_gauges,
)
from serve_app.policy.classes import CLASSES
from serve_app.redis.check import RedisWatch
from serve_app.request_queue.depths import QueueDepths
from serve_app.settings import Settings


class MetricsPage:
    """One page, assembled by one task at a time. Each sample is labelled with its replica."""

    def __init__(
        self,
        settings: Settings,
        membership: Membership,
        snapshots: Snapshots,
        depths: QueueDepths,
        limits: AdmissionLimits,
        store: JournalStore,
    ) -> None:
        self._period_s = settings.telemetry.page_period_s
        self._max_waiting = settings.queue.max_waiting
        self._membership = membership
        self._snapshots = snapshots
        self._depths = depths
        self._limits = limits
        self._store = store
        self._page = b""
        self._made_s = -math.inf
        self._making = asyncio.Lock()

    async def read(self) -> bytes:
        """The page, at most one period old plus the time to assemble it."""
        async with self._making:
            if SYSTEM.monotonic_s() - self._made_s >= self._period_s:
                self._page = await self._make()
                self._made_s = SYSTEM.monotonic_s()
            return self._page

    async def _make(self) -> bytes:
        members = self._membership.members
        pages = await self._snapshots.pages(
            [*members.names, *(one.name for one in members.workers)]
        )
        queues, kept = await asyncio.gather(self._queue_state(), self._kept_bytes())
        gauges = queue_gauges(queues, self._redis_bytes(), kept)
        return await asyncio.to_thread(merge_pages, pages, gauges)

    async def _queue_state(self) -> Mapping[str, tuple[int, int, int, float]]:
        try:
            depths, _ = await self._depths.look()
        except RedisUnavailable:
            return {}
        return {
            name: (depth.waiting, depth.claimed, self._max_waiting(name), depth.oldest_s)
            for name in CLASSES
            if (depth := depths.get(name)) is not None
        }

    def _redis_bytes(self) -> tuple[int, int] | None:
        seen = self._limits.memory.seen
        return (seen.used_bytes, seen.limit_bytes) if seen is not None else None

    async def _kept_bytes(self) -> tuple[int, int] | None:
        bound_bytes = self._limits.kept_bound_bytes
        try:
            kept = await self._store.kept("")
        except RedisUnavailable:
            return None
        return kept.in_all, int(bound_bytes) if math.isfinite(bound_bytes) else 0


class Readiness:
    """What one ingress knows of its own loops, of Redis, and of the replicas of its Ray cluster."""

    def __init__(
        self,
        settings: Settings,
        cluster: str,
        membership: Membership,
        entrance: Entrance,
        replicas: Replicas,
        loops: Loops,
        redis: RedisWatch,
        memory: MemoryLimit,
    ) -> None:
        self._workers_wanted = settings.workers.wanted
        self._ingresses_wanted = settings.ingress.replicas
        self._cluster = cluster
        self._model = settings.model.name
        self._membership = membership
        self._entrance = entrance
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
            "warnings": [
                *self._redis.warnings,
                *self._memory.warnings,
                *self._entrance.warnings,
                *self._membership.members.beside(self._cluster, self._model),
            ],
            "workers": workers,
            "workers_wanted": self._workers_wanted,
            "ingresses": self._ingresses(),
            "ingresses_wanted": self._ingresses_wanted,
        }

    def _problem(self, workers: int) -> str | None:
        if failing := self._loops.failing:
            return f"background loops of this process keep ending: {', '.join(failing)}"
        if self._redis.answer:
            return f"Redis cannot be used: {self._redis.answer}"
        reachable = self._membership.reachable
        if reachable and self._entrance.refused:
            return self._entrance.refused
        if not reachable or not self._redis.usable:
            return "the journal (Redis) cannot be reached"
        return None if workers else "no worker has its engine ready yet"

    def _workers(self) -> int:
        return len(self._replicas.mine(self._membership.members.workers))

    def _ingresses(self) -> int:
        return len(self._membership.members.others("", self._cluster, self._model))


PROBES = ("/healthz", "/readyz", "/health", "/ping", "/version")
"""Paths that need no API key, because probes have none."""
_READY_AT = ("/health", "/ping")
"""Where clients of vLLM, SGLang, llama.cpp and SageMaker ask whether a server can be used."""
MODELS_CREATED = 1_767_225_600  # 2026-01-01: the same for every replica, and across restarts


def routes(
    ingress_id: str,
    name: str,
    most_tokens: Callable[[], int],
    readiness: Readiness,
    page: MetricsPage,
) -> APIRouter:
    """The endpoints that cost no engine time.

    Args:
        name: of the served model.
        most_tokens: of a prompt and its answer; 0 if no engine says so.
        page: what `/metrics` shows.
    """
    router = APIRouter(tags=["status"])

    @router.get("/v1/models", summary="The models that are served")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(name, most_tokens())]}

    @router.get("/v1/models/{model_id:path}", summary="One model")
    async def model(model_id: str) -> dict[str, Any]:
        if model_id != name:
            raise RequestRefused(
                Reason.MODEL_NOT_FOUND,
                f"The model '{model_id[:200]}' does not exist; '{name}' is served here.",
                param="model",
            )
        return _model(name, most_tokens())

    @router.get("/healthz", summary="This process runs")
    async def healthz() -> dict[str, Any]:
        return {"status": "ok", "ingress": ingress_id, "version": __version__}

    @router.get("/readyz", summary="A request sent now would be accepted and worked on")
    async def readyz() -> JSONResponse:
        ready, facts = readiness.report()
        return JSONResponse(facts, 200 if ready else 503, None if ready else {"retry-after": "1"})

    for path in _READY_AT:
        router.add_api_route(path, readyz, methods=["GET"], include_in_schema=False)
    router.add_api_route("/ping", readyz, methods=["POST"], include_in_schema=False)

    @router.get("/version", include_in_schema=False)
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @router.get("/metrics", summary="Metrics of the whole application, by replica")
    async def metrics() -> Response:
        return Response(await page.read(), media_type=CONTENT_TYPE)

    return router


def _model(name: str, most_tokens: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": MODELS_CREATED,
        "owned_by": "hermes-serve",
        "max_model_len": most_tokens or None,  # vLLM's own field
    }
