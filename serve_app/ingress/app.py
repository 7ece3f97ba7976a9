"""The HTTP application: routes, and every error in OpenAI's shape."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from serve_app.errors import Reason, RequestRefused
from serve_app.ingress import docs_page, requests_api, status
from serve_app.ingress.answer import Answer, ResponseStart
from serve_app.ingress.runtime import Ingress
from serve_app.ingress.validation import INFERENCE_PATHS, check_content_type, check_headers
from serve_app.logs import about
from serve_app.tracing import SERVER, Span

log = logging.getLogger("hermes.ingress")

_OPEN_PATHS = ("/healthz", "/readyz", *docs_page.OPEN_PATHS)
"""Probes have no key, and a browser's address line sends none."""
_METRICS_PATH = "/metrics"

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


def build_app(ingress: Ingress) -> FastAPI:
    """The ASGI application of one ingress process."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)  # `docs_page` needs no network for them
    app.include_router(status.routes(ingress))
    app.include_router(requests_api.routes(ingress))
    endpoint = InferenceEndpoint(ingress)
    for path in INFERENCE_PATHS:
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))
    docs_page.add_docs(app, ingress.settings.model.name)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(RequestRefused, _refused_handler(ingress))
    app.add_middleware(_Guard, ingress=ingress)
    return app


class InferenceEndpoint:
    """Plain ASGI: the hot path pays for no dependency injection and no response class."""

    def __init__(self, ingress: Ingress) -> None:
        self._ingress = ingress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        what = {"http.request.method": "POST", "http.route": scope["path"], "url.path": scope["path"]}
        caller = headers.get("traceparent", "")
        with self._ingress.tracing.begin(f"POST {scope['path']}", caller, what, SERVER) as span:
            answer = await self._accept(scope, receive, headers, span)
            try:
                await self._ingress.readers.serve(answer, scope, receive, send)
                span.tell({"http.response.status_code": answer.status})
            except RequestRefused as refusal:
                span.refused(refusal.status, refusal.reason)
                await _send_refusal(send, refusal, answer.own_headers())

    async def _accept(self, scope: Scope, receive: Receive, headers: dict[str, str], span: Span) -> Answer:
        settings = self._ingress.settings
        check_content_type(headers.get("content-type", ""))
        body = await _read_body(headers, receive, settings.ingress.max_body_bytes)
        request = await self._ingress.checks.parse(scope["path"], body)
        query = scope["query_string"].decode("latin-1")
        follower, facts = await self._ingress.admission.admit(
            scope["state"]["tenant"], scope["path"], query, headers, body, request, span.traceparent
        )
        span.tell({"hermes.request_id": follower.request_id, "hermes.class": facts.request_class})
        return Answer(
            follower, self._ingress.departures, self._ingress.deadlines, scope["path"], facts.streamed,
            as_events=False, admitted_ms=facts.admitted_ms, deadline_ms=facts.deadline_ms,
            heartbeat_s=settings.ingress.heartbeat_s,
            client_request_id=facts.client_request_id,
        )  # fmt: skip


async def _read_body(headers: dict[str, str], receive: Receive, limit_bytes: int) -> bytes:
    announced = headers.get("content-length", "0")
    if announced.isascii() and announced.isdigit() and (len(announced) > 18 or int(announced) > limit_bytes):
        raise _too_large(limit_bytes)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestRefused(Reason.CLIENT_DISCONNECTED, "The client left before its request was complete.")
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(limit_bytes: int) -> RequestRefused:
    return RequestRefused(Reason.BODY_TOO_LARGE, f"The request body is longer than {limit_bytes} bytes.")


class _Guard:
    """Outermost: limits and keys before anything is parsed, and refusals wherever they come from."""

    def __init__(self, app: Any, ingress: Ingress) -> None:
        self._app = app
        self._ingress = ingress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            check_headers(scope["headers"], self._ingress.settings.ingress.max_header_bytes)
            authorization = next((v for k, v in scope["headers"] if k.lower() == b"authorization"), b"").decode(
                "latin-1"
            )
            if scope["path"] == _METRICS_PATH:
                self._ingress.keys.check_scraper(authorization)
            elif scope["path"] not in _OPEN_PATHS:
                tenant = self._ingress.keys.tenant(authorization)
                scope["state"] = {**scope.get("state", {}), "tenant": tenant}
                if scope["path"] in INFERENCE_PATHS:  # what is short, such as a `DELETE`, always finds room
                    with self._ingress.readers.connections.taken(tenant):
                        await self._app(scope, receive, send)
                    return
            await self._app(scope, receive, send)
        except RequestRefused as refusal:
            _note(self._ingress, refusal, scope.get("state", {}).get("tenant", ""))
            await _send_refusal(send, refusal, {})
        except Exception as error:
            # A defect of ours: one line for the log, an answer in the usual shape if none has begun.
            self._ingress.telemetry.refused(Reason.INTERNAL)
            where = traceback.extract_tb(error.__traceback__)[-1]
            log.error(
                "request failed: internal: %r at %s:%d", error, where.filename, where.lineno,
                extra=about(reason=Reason.INTERNAL),
            )  # fmt: skip
            await _send_refusal(send, RequestRefused(Reason.INTERNAL, "The service failed on this request."), {})


async def _send_refusal(send: Send, refusal: RequestRefused, more_headers: dict[str, str]) -> None:
    body = refusal.body()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **more_headers,
        **refusal.headers(),
    }
    encoded = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
    await send(ResponseStart(type="http.response.start", status=refusal.status, headers=encoded))
    await send({"type": "http.response.body", "body": body})


def _note(ingress: Ingress, refusal: RequestRefused, tenant: str) -> None:
    ingress.telemetry.refused(refusal.reason)
    log.info("request refused: %s: %s", refusal.reason, refusal.message, extra=about("", tenant, refusal.reason))


def _refused_handler(ingress: Ingress) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestRefused)
        _note(ingress, error, request.scope.get("state", {}).get("tenant", ""))
        return Response(error.body(), error.status, error.headers(), "application/json")

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


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    refusal = RequestRefused(Reason.INVALID_REQUEST, str(error.errors()[0]["msg"]))
    return Response(refusal.body(), refusal.status, refusal.headers(), "application/json")
