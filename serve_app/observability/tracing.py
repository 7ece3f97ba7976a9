"""Traces: HTTP, queue, dispatch and engine of one request in one trace. The journal and the queue
entry store the request's W3C `traceparent`, so every process that works on the request adds to it.
Without `telemetry.traces_endpoint` nothing is recorded, and only the empty API is loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serve_app import timings
from serve_app.errors import RequestRefused
from serve_app.settings import TelemetrySettings

Facts = Mapping[str, str | int | float | bool]

SERVER = trace.SpanKind.SERVER
CLIENT = trace.SpanKind.CLIENT
INTERNAL = trace.SpanKind.INTERNAL

_NAMES = TraceContextTextMapPropagator()
_SERVERS_FAULT = 500


class Span:
    """A span as a context manager: it ends the span, and marks it if the block raised an error."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        """The `traceparent` for child spans; empty if tracing is off."""
        carrier: dict[str, str] = {}
        _NAMES.inject(carrier, trace.set_span_in_context(self._span))
        return carrier.get("traceparent", "")

    def tell(self, facts: Facts) -> None:
        """Add attributes, with OpenTelemetry's names or our own, which begin with `hermes.`."""
        self._span.set_attributes(dict(facts))

    def __enter__(self) -> Span:
        return self

    def __exit__(self, _: object, error: BaseException | None, where: object) -> None:
        if isinstance(error, RequestRefused):
            self.refused(error.status, error.reason)
        elif error is not None:
            self._fail(type(error).__name__)
        self._span.end()

    def refused(self, status: int, reason: str) -> None:
        """The HTTP answer was this refusal. The span is an error only if the server is at fault."""
        self._span.set_attributes({"http.response.status_code": status, "error.type": str(reason)})
        if status >= _SERVERS_FAULT:
            self._fail(str(reason))

    def _fail(self, name: str) -> None:
        self._span.set_attribute("error.type", name)
        self._span.set_status(trace.Status(trace.StatusCode.ERROR, name))


_NOTHING = Span(trace.INVALID_SPAN)


class Tracing:
    """The tracer of one process."""

    def __init__(self, settings: TelemetrySettings, service: str, replica: str) -> None:
        self._tracer: trace.Tracer | None = None
        if not settings.traces_endpoint:
            return
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(settings.traces_sample_ratio)),
            resource=Resource.create({"service.name": service, "service.instance.id": replica}),
        )
        exporter = OTLPSpanExporter(endpoint=settings.traces_endpoint)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, schedule_delay_millis=timings.TRACES_EXPORT_MS)
        )
        self._tracer = self._provider.get_tracer("hermes-serve")

    def begin(
        self,
        name: str,
        parent: str,
        facts: Facts,
        kind: trace.SpanKind = INTERNAL,
        began_ms: int | None = None,
    ) -> Span:
        """Start a span, now or at a Unix time in milliseconds; a new trace if `parent` is no
        `traceparent`.
        """
        if self._tracer is None:
            return _NOTHING
        context = _NAMES.extract({"traceparent": parent})
        began_ns = None if began_ms is None else began_ms * 1_000_000
        return Span(self._tracer.start_span(name, context, kind, dict(facts), start_time=began_ns))

    async def stop(self) -> None:
        if self._tracer is not None:
            await asyncio.to_thread(self._provider.shutdown)
