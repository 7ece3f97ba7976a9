"""Endpoints that the ingress answers by itself: models, health, readiness, metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from serve_app import __version__
from serve_app.contract import Reason
from serve_app.errors import RequestRefused
from serve_app.ingress.metrics_page import MetricsPage
from serve_app.ingress.readiness import Readiness
from serve_app.observability.metrics_pages import CONTENT_TYPE

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
