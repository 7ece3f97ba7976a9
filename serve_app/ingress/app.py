"""The HTTP application: the routes, and every error in OpenAI's format."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route

from serve_app.contract import Reason
from serve_app.errors import RedisUnavailable, RequestRefused, Unreadable
from serve_app.ingress import docs_page
from serve_app.ingress.api_keys import ApiKeys
from serve_app.ingress.connection_limits import ConnectionLimit
from serve_app.ingress.guard import Guard
from serve_app.ingress.inference import InferenceEndpoint
from serve_app.ingress.refusals import (
    internal,
    note_refusal,
    refusal_answer,
    refusal_of,
)
from serve_app.ingress.slow_readers import SlowReaders
from serve_app.ingress.validation.bodies import INFERENCE_PATHS
from serve_app.observability.metrics import Telemetry

_EXPOSED = (
    "x-request-id",
    "x-client-request-id",
    "x-hermes-class",
    "x-hermes-replica",
    "x-hermes-engine",
    "x-hermes-attempts",
    "x-hermes-queue-ms",
    "x-hermes-reason",
    "x-hermes-ignored",
    "x-should-retry",
    "retry-after",
    "retry-after-ms",
)
"""Headers that web pages may read."""

_Handler = Callable[[Request, Exception], Awaitable[Response]]
"""Starlette awaits a coroutine function, and no other function that returns a coroutine."""


def build_app(
    model: str,
    inference: InferenceEndpoint,
    routers: Iterable[APIRouter],
    api_keys: ApiKeys,
    connections: ConnectionLimit,
    slow_readers: SlowReaders,
    max_header_bytes: int,
    cors_origins: Sequence[str],
    telemetry: Telemetry,
    let_in: Callable[[], bool],
) -> Guard | CORSMiddleware:
    """The ASGI application of one ingress process.

    Args:
        model: the name of the served model, for the documentation page.
        connections: the limit of connections to the inference paths.
        cors_origins: of the web pages that may call the service.
        let_in: see `Guard`.
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
    handle = _error_handler(telemetry)
    for kind in (
        HTTPException,
        RequestValidationError,
        RequestRefused,
        RedisUnavailable,
        Unreadable,
        Exception,
    ):
        app.add_exception_handler(kind, handle)
    guard = Guard(
        app, inference, api_keys, connections, slow_readers, max_header_bytes, telemetry, let_in
    )
    if not cors_origins:
        return guard
    return CORSMiddleware(
        guard,
        allow_origins=cors_origins,
        allow_methods=("GET", "HEAD", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=_EXPOSED,
    )


def _error_handler(telemetry: Telemetry) -> _Handler:
    async def handle(request: Request, error: Exception) -> Response:
        match error:
            case HTTPException():
                return refusal_answer(_unknown(request, error.status_code), error.headers)
            case RequestValidationError():
                return refusal_answer(_invalid(error))
            case RequestRefused() | RedisUnavailable() | Unreadable():
                refusal = refusal_of(error)
                note_refusal(telemetry, refusal, request.scope.get("state", {}).get("tenant", ""))
                return refusal_answer(refusal)
            case _:  # the guard counts and logs it
                return refusal_answer(internal())

    return handle


def _unknown(request: Request, status: int) -> RequestRefused:
    path = request.url.path[:200]
    if status == 405:
        message = f"Not allowed to {request.method} on {path}."
        return RequestRefused(Reason.METHOD_NOT_ALLOWED, message)
    return RequestRefused(Reason.NOT_FOUND, f"Unknown request URL: {request.method} {path}.")


def _invalid(error: RequestValidationError) -> RequestRefused:
    first = error.errors()[0]
    param = next(str(part) for part in reversed(first["loc"]) if isinstance(part, str))
    message = f"Invalid value for '{param}': {first['msg']}."
    return RequestRefused(Reason.INVALID_REQUEST, message, param=param)
