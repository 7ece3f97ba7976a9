"""Endpoints that the ingress answers by itself: models, health, readiness, metrics."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from serve_app import __version__
from serve_app.admission.limits import AdmissionLimits, MemoryLimit
from serve_app.clock import SYSTEM
from serve_app.cluster.entrance import Entrance
from serve_app.cluster.leases import Membership
from serve_app.cluster.replicas import Replicas
from serve_app.contract import IngressLease
from serve_app.errors import RedisUnavailable
from serve_app.foundation import Foundation
from serve_app.ingress.validation.bodies import check_model
from serve_app.observability.metrics_pages import CONTENT_TYPE, merge_pages, queue_gauges
from serve_app.policy.classes import CLASSES
from serve_app.redis.check import RedisWatch
from serve_app.request_queue import QueueDepths
from serve_app.settings.sections import ModelSettings


@dataclass
class MetricsPage:
    """One page, assembled by one task at a time. Each sample is labelled with its replica."""

    base: Foundation
    membership: Membership
    depths: QueueDepths
    limits: AdmissionLimits
    _page = b""
    _made_s = -math.inf
    _making: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def read(self) -> bytes:
        """The page, at most one period old plus the time to assemble it."""
        async with self._making:
            if SYSTEM.monotonic_s() - self._made_s >= self.base.settings.telemetry.page_period_s:
                self._page = await self._make()
                self._made_s = SYSTEM.monotonic_s()
            return self._page

    async def _make(self) -> bytes:
        members, seen = self.membership.members, self.limits.memory.seen
        pages = await self.base.snapshots.pages(
            [*members.names, *(one.name for one in members.workers)]
        )
        queues: dict[str, tuple[int, int, int, float]] = {}
        kept: tuple[int, int] | None = None
        try:
            depths, _ = await self.depths.look()
            for name in CLASSES:
                if (depth := depths.get(name)) is not None:
                    most = self.base.settings.queue.max_waiting(name)
                    queues[name] = (depth.waiting, depth.claimed, most, depth.oldest_s)
            bound_bytes = self.limits.kept_bound_bytes
            bound = int(bound_bytes) if math.isfinite(bound_bytes) else 0
            kept = (await self.base.store.kept("")).in_all, bound
        except RedisUnavailable:
            pass  # the page lacks what Redis would say
        redis_bytes = (seen.used_bytes, seen.limit_bytes) if seen is not None else None
        return await asyncio.to_thread(merge_pages, pages, queue_gauges(queues, redis_bytes, kept))


@dataclass
class Readiness:
    """What one ingress knows of its own loops, of Redis, and of the replicas of its Ray cluster."""

    base: Foundation
    me: IngressLease
    membership: Membership
    entrance: Entrance
    replicas: Replicas
    redis: RedisWatch
    memory: MemoryLimit

    def _counts(self) -> dict[str, int]:
        """The replicas of this Ray cluster: those there are, and those it is meant to have."""
        members, settings = self.membership.members, self.base.settings
        return {
            "workers": len(self.replicas.mine(members.workers)),
            "workers_wanted": settings.workers.wanted,
            "ingresses": len(members.others(self.me._replace(name=""))),
            "ingresses_wanted": settings.ingress.replicas,
        }

    def all_replicas_there(self) -> bool:
        counts = self._counts()
        return all(counts[name] >= counts[f"{name}_wanted"] for name in ("workers", "ingresses"))

    def report(self) -> tuple[bool, Mapping[str, object]]:
        """Whether this ingress is ready, and as JSON why not."""
        counts = self._counts()
        problem = self._problem(counts["workers"])
        beside = self.membership.members.beside(self.me)
        warnings = [*self.redis.warnings, *self.memory.warnings, *self.entrance.warnings, *beside]
        ready = problem is None
        return ready, {"ready": ready, "problem": problem, "warnings": warnings, **counts}

    def _problem(self, workers: int) -> str | None:
        if failing := self.base.loops.failing:
            return f"background loops of this process keep ending: {', '.join(failing)}"
        if self.redis.answer:
            return f"Redis cannot be used: {self.redis.answer}"
        reachable = self.membership.reachable
        if reachable and self.entrance.refused:
            return self.entrance.refused
        if not reachable or not (self.redis.usable or self.redis.untried):
            return "the journal (Redis) cannot be reached"
        if not workers:
            return "no worker has its engine ready yet"
        return "Redis is being tried for the first time" if self.redis.untried else None


PROBES = ("/healthz", "/readyz", "/health", "/ping", "/version")
"""Paths that need no API key, because probes have none."""
_READY_AT = ("/health", "/ping")
"""Where clients of vLLM, SGLang, llama.cpp and SageMaker ask whether a server can be used."""
MODELS_CREATED = 1_767_225_600  # the same for every replica, and across restarts
MODELS_CREATED_AT = "2026-01-01T00:00:00Z"


def routes(
    ingress_id: str,
    served: ModelSettings,
    most_tokens: Callable[[], int],
    readiness: Readiness,
    page: MetricsPage,
) -> APIRouter:
    """The endpoints that cost no engine time. `most_tokens`: of a prompt and its answer; 0 if no
    engine says so.
    """
    router = APIRouter(tags=["status"])

    def shown(request: Request, name: str) -> dict[str, Any]:
        model = {
            "id": name,
            "object": "model",
            "created": MODELS_CREATED,
            "owned_by": "hermes-serve",
            "max_model_len": most_tokens() or None,  # vLLM's own field
        }
        if "anthropic-version" in request.headers:
            model |= {"type": "model", "display_name": name, "created_at": MODELS_CREATED_AT}
        return model

    @router.get("/v1/models", summary="The models that are served")
    async def models(request: Request) -> dict[str, Any]:
        may_use = request.state.caller.may_use
        names = dict.fromkeys([served.name, *(one for one in served.aliases if "*" not in one)])
        data = [shown(request, name) for name in names if may_use(name, served.name)]
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        ids = {"first_id": first, "last_id": last, "has_more": False}
        anthropics = ids if "anthropic-version" in request.headers else {}
        return {"object": "list", "data": data, **anthropics}

    @router.get("/v1/models/{model_id:path}", summary="One model")
    async def model(model_id: str, request: Request) -> dict[str, Any]:
        check_model(model_id, served.name, served.aliases)
        request.state.caller.check_model(model_id, served.name)
        return shown(request, model_id)

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
