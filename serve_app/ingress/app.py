"""The HTTP application: the routes, and every error in OpenAI's format."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from serve_app.contract import Reason
from serve_app.errors import RedisUnavailable, RequestRefused
from serve_app.ingress import docs_page
from serve_app.ingress.api_keys import ApiKeys
from serve_app.ingress.connection_limits import ConnectionLimit
from serve_app.ingress.guard import Cors, Guard
from serve_app.ingress.inference import InferenceEndpoint
from serve_app.ingress.refusals import internal, journal_unavailable, note_refusal
from serve_app.ingress.validation.bodies import INFERENCE_PATHS
from serve_app.observability.metrics import Telemetry

_Handler = Callable[[Request, Exception], Awaitable[Response]]
"""Starlette awaits a coroutine function, and no other function that returns a coroutine."""


def build_app(
    model: str,
    inference: InferenceEndpoint,
    routers: Iterable[APIRouter],
    api_keys: ApiKeys,
    connections: ConnectionLimit,
    max_header_bytes: int,
    cors_origins: Sequence[str],
    telemetry: Telemetry,
) -> Guard | Cors:
    """The ASGI application of one ingress process.

    Args:
        model: the name of the served model, for the documentation page.
        connections: the limit of connections to the inference paths.
        cors_origins: of the web pages that may call the service.
    """
    app = FastAPI(
        docs_url=None,  # `docs_page` has its own
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    for router in routers:
        app.include_router(router)
    for path in INFERENCE_PATHS:
        app.router.routes.append(Route(path, inference, methods=["POST"]))
    docs_page.add_docs(app, model)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    refused = _refused_handler(telemetry)
    app.add_exception_handler(RequestRefused, refused)
    app.add_exception_handler(RedisUnavailable, _unavailable_handler(refused))
    app.add_exception_handler(Exception, _defect)
    guard = Guard(app, inference, api_keys, connections, max_header_bytes, telemetry)
    return Cors(guard, origins=cors_origins) if cors_origins else guard


def _refused_handler(telemetry: Telemetry) -> _Handler:
    async def handle(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestRefused)
        note_refusal(telemetry, error, request.scope.get("state", {}).get("tenant", ""))
        return Response(error.body(), error.status, error.headers(), "application/json")

    return handle


def _unavailable_handler(refused: _Handler) -> _Handler:
    async def handle(request: Request, _: Exception) -> Response:
        return await refused(request, journal_unavailable())

    return handle


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = Reason.METHOD_NOT_ALLOWED if error.status_code == 405 else Reason.NOT_FOUND
    message = f"Unknown request URL: {request.method} {request.url.path[:200]}."
    if reason is Reason.METHOD_NOT_ALLOWED:
        message = f"Not allowed to {request.method} on {request.url.path[:200]}."
    refusal = RequestRefused(reason, message)
    headers = {**refusal.headers(), **(error.headers or {})}
    return Response(refusal.body(), refusal.status, headers, "application/json")


async def _defect(*_: object) -> Response:
    refusal = internal()
    return Response(refusal.body(), refusal.status, refusal.headers(), "application/json")


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = next(str(part) for part in reversed(first["loc"]) if isinstance(part, str))
    message = f"Invalid value for '{param}': {first['msg']}."
    refusal = RequestRefused(Reason.INVALID_REQUEST, message, param=param)
    return Response(refusal.body(), refusal.status, refusal.headers(), "application/json")
