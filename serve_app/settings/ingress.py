"""Settings of the ingress: how many requests it admits, and how long they may take."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from serve_app.settings.sections import ORIGIN, RESOURCE, Section


class IngressSettings(Section):
    """The deployment that serves HTTP and dispatches requests."""

    replicas: int = Field(
        2,
        ge=1,
        le=1024,
        description="Number of ingresses: HTTP servers that accept requests and dispatch them",
    )
    cpus_per_replica: float = Field(1, ge=0, description="CPUs that Ray reserves for each replica")
    max_replicas_per_node: int | None = Field(
        None,
        ge=1,
        description="Most ingresses on one node; 1 spreads them over nodes. Default: no limit",
    )
    ray_resource: str = Field(
        "",
        pattern=RESOURCE,
        description="Custom Ray resource; ingresses run only on nodes that have it. Default: on "
        "any node",
    )
    max_connections: int = Field(
        4096,
        ge=1,
        description="Most requests that one ingress serves at a time; more are refused with 429",
    )
    max_body_bytes: int = Field(
        16 * 1024 * 1024,
        ge=1024,
        description="Largest request body; larger ones are refused with 413",
    )
    max_buffered_request_bytes: int = Field(
        512 * 1024 * 1024,
        ge=1024,
        description="Memory of one ingress for request bodies that are being received; more are "
        "refused with 429. One body always fits",
    )
    max_header_bytes: int = Field(
        12 * 1024,
        ge=1024,
        le=15 * 1024,
        description="Largest request headers in total; HAProxy's own limit is 16 KiB",
    )
    cors_origins: list[Annotated[str, Field(pattern=ORIGIN)]] = Field(
        [],
        description="Origins of web pages that may call the service from a browser, such as "
        "`https://chat.example.com`; `*` allows all",
    )
    heartbeat_s: float = Field(
        8.0,
        gt=0,
        description="Interval of the keepalive events of a stream without output, a second more "
        "or less",
    )
    max_readers: int = Field(
        1024,
        ge=1,
        description="Most clients that read /v1/requests/{id}/events of one ingress; more are "
        "refused with 429",
    )
    max_buffered_response_bytes: int = Field(
        256 * 1024 * 1024,
        ge=1024,
        description="Memory of one ingress for answers above 64 KiB that their clients have not "
        "read yet; more are refused with 429",
    )
    max_tenant_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of an ingress's `max_connections`, `max_readers`, "
        "`max_buffered_request_bytes` and `max_buffered_response_bytes` that one "
        "tenant may use, if API keys are required",
    )
    max_bulk_reads: int = Field(
        4,
        ge=1,
        description="Redis connections of a process for large values (bodies, parts of "
        "journals), so that small reads do not wait behind them",
    )
    stalled_client_timeout_s: float = Field(
        60.0,
        gt=0,
        description="A client that stops reading its answer, or sending its request, for this "
        "long is disconnected",
    )
    disconnect_grace_s: float = Field(
        5.0,
        ge=0,
        description="How long a disconnected client may take to reconnect before its request is "
        "cancelled",
    )
    graceful_shutdown_timeout_s: float = Field(
        600.0,
        ge=0,
        description="How long an ingress that shuts down waits for its streams to end; after "
        "that, clients can read on by request id",
    )
    request_timeout_s: float = Field(
        600.0, gt=0, description="Deadline of a request that does not set one"
    )
    max_request_timeout_s: float = Field(
        3600.0, gt=0, description="Longest deadline that x-request-timeout-seconds can set"
    )
    background_timeout_s: float = Field(
        86_400.0,
        gt=0,
        description="Default and longest deadline of a request in the background (`Prefer: "
        "respond-async`, `background: true`)",
    )

    @model_validator(mode="after")
    def _timeouts(self) -> Self:
        if self.request_timeout_s > self.max_request_timeout_s:
            raise ValueError(
                f"request_timeout_s ({self.request_timeout_s:g}) is above "
                f"max_request_timeout_s ({self.max_request_timeout_s:g})"
            )
        return self
