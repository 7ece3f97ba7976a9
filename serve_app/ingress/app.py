"""The HTTP application: the guard, the routes, and every error in OpenAI's format."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.contract import Reason
from serve_app.errors import (
    RedisUnavailable,
    RequestRefused,
    Unreadable,
    failed,
    invalid,
    invalid_value,
)
from serve_app.files.storage import StorageUnavailable
from serve_app.ingress import docs_page
from serve_app.ingress.api_keys import ApiKeys
from serve_app.ingress.client_connections import SlowReaders
from serve_app.ingress.connection_limits import ConnectionLimit
from serve_app.ingress.exchange import refusal_answer
from serve_app.ingress.inference import InferenceEndpoint
from serve_app.ingress.status import PROBES
from serve_app.ingress.validation.fields import INFERENCE_PATHS
from serve_app.observability.ingress_metrics import TenantTelemetry
from serve_app.observability.logs import about
from serve_app.observability.metrics import Telemetry
from serve_app.policy.tenant_limits import HEADERS as LIMIT_HEADERS
from serve_app.policy.tenants import Role, Tenant
from serve_app.settings import Settings

log = logging.getLogger("hermes.ingress")

_OPEN_PATHS = (*PROBES, *docs_page.OPEN_PATHS)
"""Paths that need no API key: probes have none, and a browser's address bar cannot send one."""
_METRICS_PATH = "/metrics"
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


class _Routes(FastAPI):
    """The routes alone: the guard answers all errors, so there is one place for them."""

    def build_middleware_stack(self) -> ASGIApp:
        return AsyncExitStackMiddleware(self.router)


@dataclass(eq=False)
class Guard:
    """The ASGI application of one ingress process, and its outermost layer: checks limits and API
    keys before anything is parsed, and answers refusals and defects from all layers. A path means
    the same with a slash at its end, and HEAD the same as GET. `scope["state"]` has `caller`, its
    id as `tenant`, and `headers`: by lower-case name, of several the first.

    Inference requests go straight to their endpoint, because every layer of the framework wraps
    `send`, and each token would pass them all.
    """

    settings: Settings
    inference: InferenceEndpoint
    routers: InitVar[Iterable[APIRouter]]
    api_keys: ApiKeys
    connections: ConnectionLimit
    """To the inference paths; other requests are short."""
    slow_readers: SlowReaders
    telemetry: Telemetry
    tenants: TenantTelemetry
    let_in: Callable[[], bool]
    """Whether this ingress may answer out of the namespace in Redis."""

    def __post_init__(self, routers: Iterable[APIRouter]) -> None:
        # Without `openapi_url` there are no `/docs`; `docs_page` has its own.
        self._app = _Routes(openapi_url=None, redirect_slashes=False)
        for router in routers:
            self._app.include_router(router)
        for path in INFERENCE_PATHS:
            self._app.router.routes.append(Route(path, self.inference, methods=["POST"]))
        docs_page.add_docs(self._app, self.settings.model.name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _as_routed(scope)
        try:
            await self._pass(scope, receive, send)
        except Exception as error:
            refusal, state = _refusal_of(error, scope), scope["state"]
            if not state["begun"] or refusal.reason is Reason.INTERNAL:
                self._note(error, refusal, state)
            if state["begun"]:  # the server ends the connection, and a client may reconnect
                raise
            # Its traceback has this frame, and those that hold the request's body.
            refusal.with_traceback(None)
            await refusal_answer(refusal, scope["path"])(scope, receive, send)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, headers = scope["path"], scope["state"]["headers"]
        check_headers(scope["headers"], self.settings.ingress.max_header_bytes)
        if scope["http_version"] == "1.1" and "host" not in headers:
            # RFC 9112 wants it, and not every server before us does.
            raise invalid("The request has no Host header.")
        if path == _METRICS_PATH:
            self.api_keys.tenant(_authorization(headers), Role.METRICS)
        elif path not in _OPEN_PATHS:
            caller = self._caller(path, headers)
            scope["state"].update(tenant=caller.id, caller=caller)
            if not self.let_in():
                raise RedisUnavailable("the namespace is another service's")
            if path in INFERENCE_PATHS and scope["method"] == "POST":
                with self.connections.hold(caller.id):
                    await self.slow_readers.paced(self.inference, scope, receive, send)
                return
        await self.slow_readers.paced(self._app, scope, receive, send)

    def _caller(self, path: str, headers: dict[str, str]) -> Tenant:
        """Whose request it is. A gateway names the tenant and the class in headers of its own: the
        class takes the place of what the client says.
        """
        auth = self.settings.auth
        role = None if path.startswith(_OF_ALL_TENANTS) else Role.INFERENCE
        tenant = headers.get(auth.tenant_header)
        caller = self.api_keys.tenant(_authorization(headers), role, tenant)
        request_class = headers.get(auth.class_header)
        if request_class is not None and Role.GATEWAY in caller.roles:
            headers["x-hermes-class"] = request_class
        return caller

    def _note(self, error: Exception, refusal: RequestRefused, state: dict[str, Any]) -> None:
        """Count and log a refused request, or a defect in our code."""
        tenant, reason = state.get("tenant", ""), refusal.reason  # none before its API key is known
        self.telemetry.count("hermes_requests_refused", reason)
        if tenant:
            self.tenants.refused(tenant, reason)
        extra = about("", tenant, reason)
        if reason is not Reason.INTERNAL or error is refusal:
            log.info("request refused: %s: %s", reason, refusal.message, extra=extra)
            return
        where = traceback.extract_tb(error.__traceback__)[-1]
        at = where.filename, where.lineno
        log.error("request failed: internal: %r at %s:%d", error, *at, extra=extra)


def check_headers(headers: list[tuple[bytes, bytes]], limit_bytes: int) -> None:
    """Refuse headers whose total length exceeds the limit."""
    size = sum(len(name) + len(value) + 4 for name, value in headers)
    if size > limit_bytes:
        raise RequestRefused(
            Reason.HEADERS_TOO_LARGE,
            f"The request headers are {size} bytes long; at most {limit_bytes} are allowed.",
        )


def with_cors(guard: Guard) -> Guard | CORSMiddleware:
    """The application, for web pages too if the settings name their origins."""
    if not (origins := guard.settings.ingress.cors_origins):
        return guard
    return CORSMiddleware(
        guard,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=_EXPOSED,
    )


def _authorization(headers: Mapping[str, str]) -> str:
    """Anthropic's clients send their key in a header of its own."""
    key = headers.get("x-api-key", "")
    return headers.get("authorization", f"Bearer {key}" if key else "")


def _as_routed(scope: Scope) -> Scope:
    """The request as the routes know it; the HTTP server sends no body in answer to a HEAD."""
    path, method = scope["path"].rstrip("/") or "/", scope["method"]
    headers = {
        name.lower().decode("latin-1"): value.decode("latin-1")
        for name, value in reversed(scope["headers"])
    }
    own = {"head": method == "HEAD", "begun": False, "headers": headers}
    state = {**scope.get("state", {}), **own}
    return {
        **scope,
        "path": path,
        "method": "GET" if method == "HEAD" else method,
        "state": state,
    }


def _refusal_of(error: Exception, scope: Scope) -> RequestRefused:
    """What a client is told of any error, also while Redis or the storage cannot be reached, and if
    what Redis holds of the request cannot be decoded.
    """
    match error:
        case RequestRefused():
            return error
        case HTTPException():
            return _unknown(error, scope)
        case RequestValidationError():
            first = error.errors()[0]
            param = next(str(part) for part in reversed(first["loc"]) if isinstance(part, str))
            return invalid_value(param, first["msg"])
        case Unreadable():
            log.error("a journal cannot be read: %s", error)
            return failed(Reason.JOURNAL_LOST)
        case StorageUnavailable():
            log.error("the storage of files cannot be used: %s", error)
            return _for_now(Reason.STORAGE_UNAVAILABLE, "storage of files cannot be used")
        case RedisUnavailable():
            return _for_now(Reason.JOURNAL_UNAVAILABLE, "journal cannot be reached")
        case _:
            return RequestRefused(Reason.INTERNAL, "The service failed on this request.")


def _for_now(reason: Reason, what: str) -> RequestRefused:
    message = f"The {what} at the moment; please try again."
    return RequestRefused(reason, message, retry_after_s=1)


def _unknown(error: HTTPException, scope: Scope) -> RequestRefused:
    method, path = scope["method"], scope["path"][:200]
    headers = dict(error.headers or {})
    if error.status_code == 405:
        message = f"Not allowed to {method} on {path}."
        return RequestRefused(Reason.METHOD_NOT_ALLOWED, message, more_headers=headers)
    message = f"Unknown request URL: {method} {path}."
    return RequestRefused(Reason.NOT_FOUND, message, more_headers=headers)
