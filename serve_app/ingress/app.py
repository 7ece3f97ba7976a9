"""The HTTP application: the guard, the routes, and every error in OpenAI's format."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from serve_app.contract import Reason
from serve_app.errors import MESSAGES, RedisUnavailable, RequestRefused, Unreadable
from serve_app.files.storage import StorageUnavailable
from serve_app.ingress import docs_page
from serve_app.ingress.api_keys import ApiKeys
from serve_app.ingress.connection_limits import ConnectionLimit
from serve_app.ingress.exchange import refusal_answer
from serve_app.ingress.inference import InferenceEndpoint
from serve_app.ingress.sending import SlowReaders
from serve_app.ingress.status import PROBES
from serve_app.ingress.validation.fields import INFERENCE_PATHS
from serve_app.ingress.validation.headers import check_headers, check_host
from serve_app.observability.ingress_metrics import TenantTelemetry
from serve_app.observability.logs import about
from serve_app.observability.metrics import Telemetry
from serve_app.policy.tenants import HEADERS as LIMIT_HEADERS
from serve_app.policy.tenants import Role, Tenant
from serve_app.settings import AuthSettings, Settings

log = logging.getLogger("hermes.ingress")

_REFUSALS = (RequestRefused, RedisUnavailable, StorageUnavailable, Unreadable)
_OPEN_PATHS = (*PROBES, *docs_page.OPEN_PATHS)
"""Paths that need no API key: probes have none, and a browser's address bar cannot send one."""
_METRICS_PATH = "/metrics"
_CLASS = b"x-hermes-class"
_OF_ALL_TENANTS = "/v1/organization/"
"""Below it, the routes check that the key is an operator's."""
_EXPOSED = (
    "x-request-id",
    "request-id",
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
    *LIMIT_HEADERS,
)
"""Headers that web pages may read."""


@dataclass(eq=False)
class Guard:
    """The outermost layer: checks limits and API keys before anything is parsed, and answers
    refusals from all layers. A path means the same with a slash at its end, and HEAD the same as
    GET. It sets `caller` in `scope["state"]`, and its id as `tenant`.

    Inference requests go straight to their endpoint, because every layer of the framework wraps
    `send`, and each token would pass them all.
    """

    app: FastAPI
    inference: InferenceEndpoint
    api_keys: ApiKeys
    auth: AuthSettings
    connections: ConnectionLimit
    """To the inference paths; other requests are short."""
    slow_readers: SlowReaders
    max_header_bytes: int
    telemetry: Telemetry
    tenants: TenantTelemetry
    let_in: Callable[[], bool]
    """Whether this ingress may answer out of the namespace in Redis."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope = _as_routed(scope)
        state = scope["state"]
        try:
            await self._pass(scope, receive, send)
        except _REFUSALS as error:
            if state["begun"] and not isinstance(error, RequestRefused):
                raise
            # Its traceback has this frame, and those that hold the request's body.
            refusal = refusal_of(error).with_traceback(None)
            self.note(refusal, state)
            await refusal_answer(refusal, scope["path"])(scope, receive, send)
        except Exception as error:
            self._note_defect(error, state)
            if state["begun"]:  # the server ends the connection, and a client may reconnect
                raise
            await refusal_answer(_internal(), scope["path"])(scope, receive, send)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_headers(scope["headers"], self.max_header_bytes)
        check_host(scope["http_version"], scope["headers"])
        path = scope["path"]
        if path == _METRICS_PATH:
            self.api_keys.tenant(_authorization(scope["headers"]), Role.METRICS)
        elif path not in _OPEN_PATHS:
            caller, scope = self._caller(scope)
            scope["state"].update(tenant=caller.id, caller=caller)
            if not self.let_in():
                raise RedisUnavailable("the namespace is another service's")
            if path in INFERENCE_PATHS and scope["method"] == "POST":
                with self.connections.hold(caller.id):
                    await self.slow_readers.paced(self.inference, scope, receive, send)
                return
        scope["state"]["begun"] = True  # the framework answers a defect, and raises it afterwards
        await self.slow_readers.paced(self.app, scope, receive, send)

    def _caller(self, scope: Scope) -> tuple[Tenant, Scope]:
        """Whose request it is, and the request as its own client would send it: a gateway names the
        tenant and the class in headers.
        """
        headers = scope["headers"]
        role = None if scope["path"].startswith(_OF_ALL_TENANTS) else Role.INFERENCE
        tenant = _value(headers, self.auth.tenant_header)
        caller = self.api_keys.tenant(_authorization(headers), role, tenant)
        request_class = _value(headers, self.auth.class_header)
        if request_class is None or Role.GATEWAY not in caller.roles:
            return caller, scope
        others = [one for one in headers if one[0].lower() != _CLASS]
        return caller, {**scope, "headers": [*others, (_CLASS, request_class.encode("latin-1"))]}

    def note(self, refusal: RequestRefused, state: dict[str, Any]) -> None:
        """Count and log a refused request."""
        extra = self._count(refusal.reason, state)
        log.info("request refused: %s: %s", refusal.reason, refusal.message, extra=extra)

    def _count(self, reason: Reason, state: dict[str, Any]) -> dict[str, str]:
        """Count a refusal. Returns what a line about it has beside its text."""
        self.telemetry.count("hermes_requests_refused", reason)
        tenant = state.get("tenant", "")  # empty before its API key is known
        if tenant:
            self.tenants.refused(tenant, reason)
        return about("", tenant, reason)

    def _note_defect(self, error: Exception, state: dict[str, Any]) -> None:
        """Count and log a defect in our code."""
        extra = self._count(Reason.INTERNAL, state)
        where = traceback.extract_tb(error.__traceback__)[-1]
        log.error(
            "request failed: internal: %r at %s:%d",
            error,
            where.filename,
            where.lineno,
            extra=extra,
        )


def build_app(
    settings: Settings,
    inference: InferenceEndpoint,
    routers: Iterable[APIRouter],
    api_keys: ApiKeys,
    connections: ConnectionLimit,
    slow_readers: SlowReaders,
    telemetry: Telemetry,
    tenants: TenantTelemetry,
    let_in: Callable[[], bool],
) -> Guard | CORSMiddleware:
    """The ASGI application of one ingress process, see `Guard`."""
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
    docs_page.add_docs(app, settings.model.name)
    most_bytes, cors_origins = settings.ingress.max_header_bytes, settings.ingress.cors_origins
    guard = Guard(
        app,
        inference,
        api_keys,
        settings.auth,
        connections,
        slow_readers,
        most_bytes,
        telemetry,
        tenants,
        let_in,
    )

    async def handle(request: Request, error: Exception) -> Response:
        path = request.url.path
        match error:
            case HTTPException():
                return refusal_answer(_unknown(request, error.status_code), path, error.headers)
            case RequestValidationError():
                return refusal_answer(_invalid(error), path)
            case RequestRefused() | RedisUnavailable() | StorageUnavailable() | Unreadable():
                refusal = refusal_of(error)
                guard.note(refusal, request.scope.get("state", {}))
                return refusal_answer(refusal, path)
            case _:  # the guard counts and logs it
                return refusal_answer(_internal(), path)

    for kind in (HTTPException, RequestValidationError, *_REFUSALS, Exception):
        app.add_exception_handler(kind, handle)
    if not cors_origins:
        return guard
    return CORSMiddleware(
        guard,
        allow_origins=cors_origins,
        allow_methods=("GET", "HEAD", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=_EXPOSED,
    )


def _value(headers: Sequence[tuple[bytes, bytes]], name: str) -> str | None:
    """The first header of a name, in lower case; None if there is none."""
    if not name:
        return None
    wanted = name.encode()
    return next((value.decode("latin-1") for one, value in headers if one.lower() == wanted), None)


def _authorization(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Anthropic's clients send their key in a header of its own."""
    found = {name.lower(): value for name, value in reversed(headers)}
    key = found.get(b"x-api-key", b"")
    return found.get(b"authorization", b"Bearer " + key if key else b"").decode("latin-1")


def _as_routed(scope: Scope) -> Scope:
    """The request as the routes know it; the HTTP server sends no body in answer to a HEAD."""
    path, method = scope["path"].rstrip("/") or "/", scope["method"]
    state = {**scope.get("state", {}), "head": method == "HEAD", "begun": False}
    return {
        **scope,
        "path": path,
        "method": "GET" if method == "HEAD" else method,
        "state": state,
    }


def _internal() -> RequestRefused:
    return RequestRefused(Reason.INTERNAL, "The service failed on this request.")


def refusal_of(
    error: RequestRefused | RedisUnavailable | StorageUnavailable | Unreadable,
) -> RequestRefused:
    """The refusal of a query about a request or a file, also while Redis or the storage cannot be
    reached, and if what Redis holds of the request cannot be decoded.
    """
    if isinstance(error, RequestRefused):
        return error
    if isinstance(error, Unreadable):
        log.error("a journal cannot be read: %s", error)
        return RequestRefused(Reason.JOURNAL_LOST, MESSAGES[Reason.JOURNAL_LOST])
    if isinstance(error, StorageUnavailable):
        log.error("the storage of files cannot be used: %s", error)
        return RequestRefused(
            Reason.STORAGE_UNAVAILABLE,
            "The storage of files cannot be used at the moment; please try again.",
            retry_after_s=1,
        )
    return RequestRefused(
        Reason.JOURNAL_UNAVAILABLE,
        "The journal cannot be reached at the moment; please try again.",
        retry_after_s=1,
    )


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
