"""Settings of metrics, logs and traces."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from serve_app.settings.section import ENDPOINT, Section


class TelemetrySettings(Section):
    """Metrics, logs and traces."""

    snapshot_period_s: float = Field(
        2.0, gt=0, description="How often each process writes its metrics to Redis for /metrics"
    )
    page_period_s: float = Field(
        1.0, ge=0, description="An ingress assembles /metrics at most this often"
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Level of the service's own log lines"
    )
    log_format: Literal["text", "json"] = Field(
        "text",
        description="`json` writes one object per line, with request_id, tenant and reason as "
        "fields",
    )
    traces_endpoint: str = Field(
        "",
        pattern=ENDPOINT,
        description="OTLP over HTTP, such as http://collector:4318/v1/traces; empty disables "
        "traces",
    )
    traces_sample_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of the requests to trace among those whose caller sends no "
        "`traceparent`",
    )
