"""The outermost layer: checks limits and API keys before anything is parsed, and answers refusals
from all layers. A path means the same with a slash at its end, and HEAD the same as GET.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from serve_app.contract import Reason
from serve_app.errors import RedisUnavailable, RequestRefused, Unreadable
from serve_app.ingress import docs_page
from serve_app.ingress.api_keys import ApiKeys
from serve_app.ingress.connection_limits import ConnectionLimit
from serve_app.ingress.inference import InferenceEndpoint
from serve_app.ingress.refusals import (
    internal,
    note_refusal,
    refusal_answer,
    refusal_of,
)
from serve_app.ingress.slow_readers import SlowReaders
from serve_app.ingress.status import PROBES
from serve_app.ingress.validation.bodies import INFERENCE_PATHS
from serve_app.ingress.validation.headers import check_headers, check_host
from serve_app.observability.logs import about
from serve_app.observability.metrics import Telemetry

log = logging.getLogger("hermes.ingress")

_OPEN_PATHS = (*PROBES, *docs_page.OPEN_PATHS)
"""Paths that need no API key: probes have none, and a browser's address bar cannot send one."""
_METRICS_PATH = "/metrics"


class Guard:
    """ASGI middleware. It sets `tenant` and `key` in `scope["state"]` to the request's caller.

    Inference requests go straight to their endpoint, because every layer of the framework wraps
    `send`, and each token would pass them all. All other answers are sent by `SlowReaders.paced`.

    Args:
        let_in: whether this ingress may answer out of the namespace in Redis.
    """

    def __init__(
        self,
        app: Any,
        inference: InferenceEndpoint,
        api_keys: ApiKeys,
        connections: ConnectionLimit,
        slow_readers: SlowReaders,
        max_header_bytes: int,
        telemetry: Telemetry,
        let_in: Callable[[], bool],
    ) -> None:
        self._app = app
        self._inference = inference
        self._api_keys = api_keys
        self._connections = connections
        self._slow_readers = slow_readers
        self._max_header_bytes = max_header_bytes
        self._telemetry = telemetry
        self._let_in = let_in

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _as_routed(scope)
        state = scope["state"]
        try:
            await self._pass(scope, receive, send)
        except (RequestRefused, RedisUnavailable, Unreadable) as error:
            if state["begun"] and not isinstance(error, RequestRefused):
                raise
            # Its traceback has this frame, and those that hold the request's body.
            refusal = refusal_of(error).with_traceback(None)
            note_refusal(self._telemetry, refusal, state.get("tenant", ""))
            await refusal_answer(refusal)(scope, receive, send)
        except Exception as error:
            self._note_defect(error)
            if state["begun"]:  # the server ends the connection, and a client may reconnect
                raise
            await refusal_answer(internal())(scope, receive, send)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_headers(scope["headers"], self._max_header_bytes)
        check_host(scope["http_version"], scope["headers"])
        authorization = next(
            (v for k, v in scope["headers"] if k.lower() == b"authorization"), b""
        ).decode("latin-1")
        path = scope["path"]
        if path == _METRICS_PATH:
            self._api_keys.check_scraper(authorization)
        elif path not in _OPEN_PATHS:
            tenant, key = self._api_keys.caller(authorization)
            scope["state"].update(tenant=tenant, key=key)
            if not self._let_in():
                raise RedisUnavailable("the namespace is another service's")
            if path in INFERENCE_PATHS and scope["method"] == "POST":  # others are short
                with self._connections.hold(tenant):
                    await self._inference(scope, receive, send)
                return
        scope["state"]["begun"] = True  # the framework answers a defect, and raises it afterwards
        await self._slow_readers.paced(self._app, scope, receive, send)

    def _note_defect(self, error: Exception) -> None:
        """Count and log a defect in our code."""
        self._telemetry.refused(Reason.INTERNAL)
        where = traceback.extract_tb(error.__traceback__)[-1]
        log.error(
            "request failed: internal: %r at %s:%d",
            error,
            where.filename,
            where.lineno,
            extra=about(reason=Reason.INTERNAL),
        )


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
