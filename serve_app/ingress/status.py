"""What the ingress answers by itself: models, health, readiness, metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from serve_app import __version__
from serve_app.errors import Reason, RequestRefused
from serve_app.ingress.runtime import Ingress
from serve_app.telemetry import CONTENT_TYPE

MODELS_CREATED = 1_767_225_600  # 2026-01-01: the same from every replica, and stable over restarts


def routes(ingress: Ingress) -> APIRouter:
    """The endpoints that cost no engine time."""
    router = APIRouter(tags=["status"])
    name = ingress.settings.model.name

    @router.get("/v1/models", summary="The models that are served")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(name)]}

    @router.get("/v1/models/{model_id:path}", summary="One model")
    async def model(model_id: str) -> dict[str, Any]:
        if model_id != name:
            raise RequestRefused(
                Reason.MODEL_NOT_FOUND, f"The model '{model_id[:200]}' does not exist; '{name}' is served here.",
                param="model",
            )  # fmt: skip
        return _model(name)

    @router.get("/healthz", summary="This process runs")
    async def healthz() -> dict[str, Any]:
        return {"status": "ok", "ingress": ingress.id, "version": __version__}

    @router.get("/readyz", summary="A request sent now would be accepted and worked on")
    async def readyz() -> JSONResponse:
        ready, facts = await ingress.readiness()
        return JSONResponse(facts, 200 if ready else 503, None if ready else {"retry-after": "1"})

    @router.get("/metrics", summary="Metrics of the whole application, by replica")
    async def metrics() -> Response:
        return Response(await ingress.metrics.read(), media_type=CONTENT_TYPE)

    return router


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": MODELS_CREATED, "owned_by": "hermes-serve"}
