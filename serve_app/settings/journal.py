"""Settings of the journal."""

from __future__ import annotations

from pydantic import Field

from serve_app.settings.section import Section


class JournalSettings(Section):
    """How large an answer can be, and how long it can be read."""

    retention_s: float = Field(
        900.0, gt=0, description="How long a request can still be read after it has ended"
    )
    max_answer_bytes: int = Field(
        64 << 20,
        ge=65_536,
        le=1 << 30,
        description="Bytes of an answer in the journal: the response, and the engine's outputs "
        "with their log probabilities. A longer one ends with the reason `answer_too_large`",
    )
    detached_retention_s: float = Field(
        86_400.0,
        gt=0,
        description="The same for a request that nobody waits for (`Prefer: respond-async`), "
        "unless it sets another time, and for stored responses and chat completions",
    )
    store_responses: bool = Field(
        True,
        description="Whether a response is stored unless it says `store: false`, as OpenAI does: "
        "its input and answer are kept for `journal.detached_retention_s`, where there is room",
    )
    max_retention_s: float = Field(
        7 * 86_400.0, gt=0, description="Longest time that x-hermes-retention-seconds can set"
    )
    max_kept_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of what requests may use of Redis's memory (`redis.max_memory_share`) "
        "that answers kept for later may occupy, and of that a tenant "
        "`queue.max_tenant_share`; beyond it `Prefer: respond-async` is refused (`results_full`)",
    )
    ledger_days: float = Field(
        100.0,
        gt=0,
        le=3650,
        description="How long the ledger keeps what was used in an hour, by tenant, API key, class "
        "and model: some 150 bytes each",
    )
    listed_requests: int = Field(
        10_000, ge=0, description="Latest requests of a tenant that GET /v1/requests lists"
    )
    transcript_compression_level: int = Field(
        1, ge=0, le=9, description="zlib level for finished answers; 0 stores them uncompressed"
    )
