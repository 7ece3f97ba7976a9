"""Settings of Redis: where it is, and how long it may take to answer."""

from __future__ import annotations

from pydantic import Field, field_validator

from serve_app.redaction import hide
from serve_app.settings.redis_address import RedisAddress, redis_address
from serve_app.settings.section import Section


class RedisSettings(Section):
    """The Redis that holds the journal and the queue."""

    url: str = Field(
        "redis://127.0.0.1:6380/0",
        repr=False,  # it may hold a password
        description="redis://, rediss:// (TLS), unix:// or redis[s]+sentinel://",
    )
    ca_file: str = Field(
        "", description="For rediss://: CA certificates to trust instead of the system's"
    )
    connect_timeout_s: float = Field(
        1.0, gt=0, description="Redis counts as unreachable if a connection takes longer"
    )
    response_timeout_s: float = Field(
        5.0, gt=0, description="A connection is dropped if an answer takes longer"
    )
    admission_timeout_s: float = Field(
        2.0, gt=0, description="The client gets 503 if accepting its request takes longer"
    )
    max_memory_share: float = Field(
        0.8,
        gt=0,
        le=1,
        description="Share of Redis's `maxmemory` above which new requests are refused, so that "
        "accepted ones can always end",
    )

    @field_validator("url")
    @classmethod
    def _has_an_address(cls, url: str) -> str:
        for secret in redis_address(url).secrets:
            hide(secret)
        return url

    @property
    def address(self) -> RedisAddress:
        """What `url` says."""
        return redis_address(self.url)
