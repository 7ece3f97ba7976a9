"""Settings of the ingress: how many requests it admits, and how long they may take."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from serve_app.settings.sections import ORIGIN, RESOURCE, Section


class IngressSettings(Section):
    """The deployment that serves HTTP and dispatches requests."""

    replicas: int = Field(2, ge=1, le=1024, description="HTTP servers, each with a dispatcher")
    cpus_per_replica: float = Field(1, ge=0, description="CPUs that Ray reserves for each replica")
    max_replicas_per_node: int | None = Field(
        None,
        ge=1,
        description="Most ingresses on one node; with 1 the death of a node takes only one. "
        "Default: no limit",
    )
    ray_resource: str = Field(
        "",
        pattern=RESOURCE,
        description="Custom Ray resource; ingresses run only on nodes that have it. Default: on "
        "any node",
    )
    max_connections: int = Field(
        4096, ge=1, description="Requests that one ingress holds at a time; more are refused"
    )
    max_body_bytes: int = Field(
        16 * 1024 * 1024,
        ge=1024,
        description="Largest request body; larger ones are refused with 413",
    )
    max_upload_bytes: int = Field(
        512 * 1024 * 1024,
        ge=1024,
        description="Bytes of request bodies that one ingress holds at a time until it accepts the "
        "requests; more are refused with 429. One body always fits; small ones do not count",
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
        "`https://chat.example.com`; `*` allows all. Default: none",
    )
    heartbeat_s: float = Field(
        8.0,
        gt=0,
        description="While a stream waits for output, the ingress sends an event without effect "
        "this often, a second more or less",
    )
    max_readers: int = Field(
        1024,
        ge=1,
        description="Connections to /v1/requests/{id}/events that one ingress holds at a time; "
        "more are refused",
    )
    max_unread_bytes: int = Field(
        256 * 1024 * 1024,
        ge=1024,
        description="Bytes of large answers that one ingress holds at a time until their clients "
        "have taken them; more are refused with 429. Answers up to 64 KiB do not count",
    )
    max_tenant_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of an ingress's connections, readers, `max_upload_bytes` and "
        "`max_unread_bytes` that one tenant may use, if API keys are required",
    )
    max_bulk_reads: int = Field(
        4,
        ge=1,
        description="Connections of a process for what is large: bodies, and parts of journals. "
        "Each carries one at a time",
    )
    stalled_reader_s: float = Field(
        60.0,
        gt=0,
        description="A client that reads nothing of its answer, or sends nothing more of its "
        "request, for this long is disconnected",
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
        description="How long a leaving ingress waits for its streams to end; longer streams are "
        "disconnected and can be resumed by request ID",
    )
    request_timeout_s: float = Field(
        600.0, gt=0, description="Deadline of a request that does not set one"
    )
    max_request_timeout_s: float = Field(
        3600.0, gt=0, description="Longest deadline that x-request-timeout-seconds can set"
    )
    detached_timeout_s: float = Field(
        86_400.0,
        gt=0,
        description="Deadline of a request that nobody waits for (`Prefer: respond-async`), and "
        "the longest that it can set",
    )

    @model_validator(mode="after")
    def _timeouts(self) -> Self:
        if self.request_timeout_s > self.max_request_timeout_s:
            raise ValueError(
                f"request_timeout_s ({self.request_timeout_s:g}) is above "
                f"max_request_timeout_s ({self.max_request_timeout_s:g})"
            )
        return self
