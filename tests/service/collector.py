"""An OTLP receiver that keeps what it receives for the tests."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Told:
    """One span. Ids are hex; times are Unix nanoseconds."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    began_ns: int
    ended_ns: int
    facts: dict[str, Any]


class Collector:
    """Listens on the loopback until it is closed."""

    def __init__(self, port: int = 0) -> None:
        spans: list[Told] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                spans.extend(_spans(ExportTraceServiceRequest.FromString(body)))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._spans = spans
        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        """The value for `telemetry.traces_endpoint`."""
        return f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def trace(self, trace_id: str) -> dict[str, list[Told]]:
        """The spans of a trace so far, by name."""
        found: dict[str, list[Told]] = {}
        for span in list(self._spans):
            if span.trace_id == trace_id:
                found.setdefault(span.name, []).append(span)
        return found

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def _spans(request: Any) -> Iterator[Told]:
    for resource in request.resource_spans:
        service = _facts(resource.resource.attributes).get("service.name", "")
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Told(
                    span.name,
                    service,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    _facts(span.attributes),
                )


def _facts(attributes: Any) -> dict[str, Any]:
    return {
        item.key: getattr(item.value, item.value.WhichOneof("value") or "string_value")
        for item in attributes
    }
