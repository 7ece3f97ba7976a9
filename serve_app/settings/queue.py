"""Settings of the queue: how much may wait, for how long, and when a request is poison."""

from __future__ import annotations

from pydantic import Field

from serve_app.settings.section import Section


class QueueSettings(Section):
    """How much may wait in the queue of each class."""

    max_waiting_critical: int = Field(
        100, ge=0, description="Waiting requests of the class `critical`; more are refused with 429"
    )
    max_waiting_realtime: int = Field(1_000, ge=0, description="Same for `realtime`")
    max_waiting_standard: int = Field(10_000, ge=0, description="Same for `standard`")
    max_waiting_batch: int = Field(100_000, ge=0, description="Same for `batch`")
    max_waiting_bytes_critical: int = Field(
        64 << 20,
        ge=1,
        description="Bytes in the bodies of waiting `critical` requests; more are refused with "
        "429. All classes together get at most half of the memory that requests may "
        "use in Redis",
    )
    max_waiting_bytes_realtime: int = Field(256 << 20, ge=1, description="Same for `realtime`")
    max_waiting_bytes_standard: int = Field(1 << 30, ge=1, description="Same for `standard`")
    max_waiting_bytes_batch: int = Field(1 << 30, ge=1, description="Same for `batch`")
    max_tenant_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of a class's queue, in sequences and bytes, that one tenant may use, "
        "if API keys are required; of one request count no more than an engine runs at a time",
    )
    poison_after: int = Field(
        3, ge=1, description="A request that has killed this many engines is given up"
    )
    dead_letters: int = Field(
        100, ge=0, description="How many given-up requests are kept for `scripts/dead-letters`"
    )

    def max_waiting(self, request_class: str) -> int:
        """How many requests of one class may wait."""
        bound: int = getattr(self, f"max_waiting_{request_class}")
        return bound

    def max_waiting_bytes(self, request_class: str) -> int:
        """How many bytes of one class's bodies may wait."""
        bound: int = getattr(self, f"max_waiting_bytes_{request_class}")
        return bound
