"""Settings of the door: who is let in, how many, and how much of them may wait."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from serve_app.section import Section


class IngressSettings(Section):
    """The deployment that speaks HTTP and dispatches."""

    replicas: int = Field(2, ge=1, le=1024, description="HTTP servers, each with a dispatcher")
    cpus_per_replica: float = Field(1, ge=0, description="that Ray reserves")
    max_replicas_per_node: int | None = Field(None, ge=1, description="1: the death of a node takes one; default: any")
    ray_resource: str = Field("", pattern=r"^\w*$", description="custom Ray resource of the nodes that may hold one")
    max_connections: int = Field(4096, ge=1, description="requests that one ingress holds at a time")
    max_body_bytes: int = Field(16 * 1024 * 1024, ge=1024, description="longer requests are refused with 413")
    max_header_bytes: int = Field(12 * 1024, ge=1024, le=15 * 1024, description="HAProxy's own limit is 16 KiB")
    heartbeat_s: float = Field(10.0, gt=0, description="an SSE comment this often while a stream waits")
    max_readers: int = Field(1024, ge=1, description="connections to /v1/requests/{id}/events that one ingress holds")
    max_tenant_share: float = Field(
        0.5, gt=0, le=1, description="of an ingress's connections and readers for one tenant; where keys are required"
    )
    max_bulk_reads: int = Field(4, ge=1, description="long parts of journals that one ingress reads at a time")
    stalled_reader_s: float = Field(60.0, gt=0, description="without taking a byte, before a client is cut")
    disconnect_grace_s: float = Field(5.0, ge=0, description="for a client to come back before it is cancelled")
    graceful_shutdown_timeout_s: float = Field(
        600.0, ge=0, description="for the streams of a leaving ingress to end, before their connections break"
    )
    request_timeout_s: float = Field(600.0, gt=0, description="deadline of a request that names none")
    max_request_timeout_s: float = Field(3600.0, gt=0, description="the most x-request-timeout-seconds can ask for")

    @model_validator(mode="after")
    def _timeouts(self) -> Self:
        if self.request_timeout_s > self.max_request_timeout_s:
            raise ValueError(
                f"request_timeout_s ({self.request_timeout_s:g}) is above "
                f"max_request_timeout_s ({self.max_request_timeout_s:g})"
            )
        return self


class QueueSettings(Section):
    """Bounds of the waiting lines, by class."""

    max_waiting_realtime: int = Field(1_000, ge=0, description="requests; more are refused with 429")
    max_waiting_standard: int = Field(10_000, ge=0, description="the same for standard")
    max_waiting_batch: int = Field(100_000, ge=0, description="the same for batch")
    max_waiting_bytes_realtime: int = Field(
        256 << 20, ge=1, description="of waiting requests' bodies, likewise; at most half of what Redis has room for"
    )
    max_waiting_bytes_standard: int = Field(1 << 30, ge=1, description="the same for standard")
    max_waiting_bytes_batch: int = Field(1 << 30, ge=1, description="the same for batch")
    max_tenant_share: float = Field(
        0.5, gt=0, le=1, description="of a class's line for one tenant, in requests and bytes; where keys are required"
    )
    poison_after: int = Field(3, ge=1, description="engines that one request may take down before it is given up")
    dead_letters: int = Field(100, ge=0, description="requests given up that are kept for `scripts/dead-letters`")

    def max_waiting(self, request_class: str) -> int:
        """The bound of one class, in requests."""
        bound: int = getattr(self, f"max_waiting_{request_class}")
        return bound

    def max_waiting_bytes(self, request_class: str) -> int:
        """The bound of one class, in bytes."""
        bound: int = getattr(self, f"max_waiting_bytes_{request_class}")
        return bound
