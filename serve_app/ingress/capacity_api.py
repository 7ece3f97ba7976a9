"""`/v1/capacity`: what this ingress knows of the load, without asking Redis. Operators see all of
it, a tenant its own part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from serve_app.admission.limits import AdmissionLimits
from serve_app.cluster.members import Members
from serve_app.contract import EngineReport
from serve_app.policy.classes import CLASSES
from serve_app.policy.overload import Overload
from serve_app.policy.tenants import Tenant


@dataclass(frozen=True)
class Capacity:
    """The answers of one ingress. Times are seconds and at most half a second old; `None` is not
    known.
    """

    ingress: str
    model: str
    overload: Overload
    limits: AdmissionLimits
    members: Callable[[], Members]

    def of_all(self) -> dict[str, Any]:
        """What waits by class, and what the engines of each model of the namespace have."""
        engines = self.members().engines
        models = {self.model, *(one.model for one in engines if one.model)}
        data = [self._engines(name, engines) for name in sorted(models)]
        return self._answer(classes={name: self._class(name) for name in CLASSES}, data=data)

    def of_tenant(self, caller: Tenant) -> dict[str, Any]:
        """What it has waiting that came to this ingress, and how long its next request waits."""
        waiting = Counter(
            place.request_class for place in self.limits.waiting if place.tenant == caller.id
        )
        classes = {
            name: {
                "waiting": waiting[name],
                "estimated_wait_s": _rounded(self.overload.wait_s(name, caller.id)),
                "breaker": self._breaker(name),
            }
            for name in caller.classes
        }
        return self._answer(tenant=caller.id, classes=classes, limits=caller.limits._asdict())

    def _answer(self, **fields: Any) -> dict[str, Any]:
        return {"object": "capacity", "ingress": self.ingress, "model": self.model, **fields}

    def _class(self, name: str) -> dict[str, Any]:
        depth, flow = self.limits.depths.get(name), self.overload.flow(name)
        return {
            "unclaimed": depth.waiting if depth else None,
            "claimed": depth.claimed if depth else None,
            "oldest_unclaimed_s": _rounded(depth.oldest_s) if depth else None,
            "waiting_cost": round(flow.backlog),
            "drain_cost_per_s": _rounded(self.overload.drain_per_s(name)),
            "estimated_wait_s": _rounded(self.overload.wait_s(name)),
            "breaker": self._breaker(name),
        }

    def _breaker(self, name: str) -> str:
        return "open" if name in self.overload.open else "closed"

    def _engines(self, model: str, reports: tuple[EngineReport, ...]) -> dict[str, Any]:
        """Also of those that do not say what they serve: of an older version, which has one."""
        own = [one for one in reports if (one.model or self.model) == model]
        kv_tokens = sum(one.kv_tokens for one in own)
        used = sum(one.used_tokens for one in own)
        return {
            "model": model,
            "replicas": len(own),
            "sequences_running": sum(one.running for one in own),
            "sequences_waiting": sum(one.waiting for one in own),
            "kv_tokens": kv_tokens,
            "kv_used": _rounded(used / kv_tokens if kv_tokens else None),
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def routes(capacity: Capacity) -> APIRouter:
    router = APIRouter(tags=["status"])

    @router.get("/v1/capacity", summary="Waits and limits of your requests; of all, for admins")
    async def shown(request: Request) -> JSONResponse:
        caller: Tenant = request.state.caller
        return JSONResponse(capacity.of_all() if caller.admin else capacity.of_tenant(caller))

    return router
