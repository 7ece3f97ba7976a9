"""The base class of every section of the settings tree, and the smaller sections: who may send,
what is kept, the model, the order of work, the queue, Redis, routing and telemetry.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from serve_app.errors import SettingsError
from serve_app.redaction import hide
from serve_app.settings.redis_address import RedisAddress, redis_address

NAMESPACE = r"^[A-Za-z0-9_.-]+$"
SERVICE = r"^[^\p{Z}\p{Cc}\p{Cf}]*$"
RESOURCE = r"^[A-Za-z0-9_]*$"
MODEL_NAME = r"^[^\p{Z}\p{Cc}\p{Cf}:]+$"
MODEL_SOURCE = r"^(/[^\p{Cc}]*|(s3|gs|az)://[^\p{Z}\p{Cc}]+|[^./~\p{Z}\p{Cc}][^/\p{Z}\p{Cc}]*(/[^/\p{Z}\p{Cc}]+)?)$"
ENDPOINT = r"^(https?://[^\p{Z}\p{Cc}]+)?$"
ORIGIN = r"^(\*|https?://[^/\p{Z}\p{Cc}]+)$"

LARGEST = 2**53
"""Up to here every number of YAML and JSON is exact; the chart's YAML has no larger ones."""

FORMS = {
    NAMESPACE: "takes letters, digits, '_', '.' and '-'",
    SERVICE: "takes no spaces",
    RESOURCE: "takes letters, digits and '_'",
    MODEL_NAME: "takes no spaces and no ':'",
    MODEL_SOURCE: "takes a folder by its full path, a hub id (organisation/model, no URL) or "
    "builtin:tiny",
    ENDPOINT: "takes a URL such as http://collector:4318/v1/traces",
    ORIGIN: "takes '*' and origins such as https://chat.example.com",
}
"""What each pattern of the tree means. The chart checks the same patterns, with Go's syntax."""


def _bounded(schema: dict[str, Any]) -> None:
    """Adds the largest number to a section's schema, for whoever checks only that."""
    for setting in schema.get("properties", {}).values():
        if setting.get("additionalProperties") is True:
            setting["additionalProperties"] = {"minimum": -LARGEST, "maximum": LARGEST}
        for node in (setting, *setting.get("anyOf", ()), setting.get("additionalProperties")):
            is_number = isinstance(node, dict) and node.get("type") in ("integer", "number")
            if is_number and "exclusiveMaximum" not in node:
                node.setdefault("maximum", LARGEST)


class Section(BaseModel):
    """A section of the tree. It is immutable, and an unknown setting is an error. Infinity, which
    YAML writes `.inf`, is refused: such a weight would turn the counters of all tenants into NaN.

    Types are those of JSON, as in the chart's schema: no text is a number, but 2.0 is 2.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        strict=True,
        json_schema_extra=_bounded,
    )

    @model_validator(mode="before")
    @classmethod
    def _whole(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for key, value in given.items():
            for name, number in value.items() if isinstance(value, dict) else [("", value)]:
                if isinstance(number, int | float) and LARGEST < abs(number) < float("inf"):
                    path = f"{key}.{name}".rstrip(".")
                    raise ValueError(f"{path} takes no number beyond {LARGEST:,}")
        return {
            key: int(value) if isinstance(value, float) and value.is_integer() else value
            for key, value in given.items()
        }


DEFAULT_TENANT = "default"
"""The tenant of every request if no API key is required."""


class AuthSettings(Section):
    """Who may send requests."""

    required: bool = Field(
        False,
        description="Whether requests need an API key; /healthz, other probes and /docs do not",
    )
    keys_file: str = Field(
        "",
        description="File with tenants and the hashes of their API keys, which is read again "
        "when it changes",
    )
    critical_tenants: tuple[str, ...] = Field(
        (),
        strict=False,  # a list of YAML is no tuple
        description="Tenants that may send `critical` requests, which go before all others; "
        "`default` is everybody if no API key is required",
    )
    admin_tenants: tuple[str, ...] = Field(
        (),
        strict=False,
        description="Tenants of operators, who read all usage and dead letters; everybody may "
        "if no API key is required",
    )


class JournalSettings(Section):
    """How large an answer can be, and how long it can be read."""

    retention_s: float = Field(
        900.0, gt=0, description="How long the answer of a request can be read after its end"
    )
    max_answer_bytes: int = Field(
        64 << 20,
        ge=65_536,
        le=1 << 30,
        description="Largest answer in the journal, with its log probabilities; a larger one "
        "ends with `answer_too_large`",
    )
    background_retention_s: float = Field(
        86_400.0,
        gt=0,
        description="How long the answer of a background request, and a stored response or chat "
        "completion, can be read, unless the request sets another time",
    )
    store_responses: bool = Field(
        True,
        description="Whether a response is stored for `journal.background_retention_s`, where "
        "there is room, unless it says `store: false`, as OpenAI does",
    )
    max_retention_s: float = Field(
        7 * 86_400.0, gt=0, description="Longest time that x-hermes-retention-seconds can set"
    )
    max_retained_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of what requests may use in Redis (`redis.max_memory_share`) for "
        "answers that are retained for later reading; beyond it "
        "`Prefer: respond-async` is refused (`results_full`). A tenant gets "
        "`queue.max_tenant_share` of it",
    )
    linger_ms: float = Field(
        50.0,
        ge=0,
        le=200,
        description="Longest time that a busy worker delays tokens to send several of a stream "
        "as one event. Below 1,000 events a second no token waits; first and last "
        "tokens never do. 0: no delay",
    )
    usage_retention_days: float = Field(
        100.0,
        gt=0,
        le=3650,
        description="How long the hourly usage of each tenant, API key, class and model is kept "
        "(`GET /v1/usage`): some 150 bytes each",
    )
    listed_requests: int = Field(
        10_000, ge=0, description="Latest requests of a tenant that GET /v1/requests lists"
    )
    transcript_compression_level: int = Field(
        1, ge=0, le=9, description="zlib level for finished answers; 0 stores them uncompressed"
    )


BUILTIN_MODELS = {"builtin:tiny": ("workers", "tiny_model")}
"""Models that ship with the project, as package and folder."""


class ModelSettings(Section):
    """The served model: `name` for clients, `source` for the engine (a path or a hub id)."""

    name: str = Field(
        "hermes-tiny",
        min_length=1,
        max_length=128,
        pattern=MODEL_NAME,
        description="Name by which clients request the model",
    )
    source: str = Field(
        "builtin:tiny",
        pattern=MODEL_SOURCE,
        description="Folder or hub id of the model, or `builtin:tiny` for the model that ships "
        "with the project",
    )

    @property
    def path(self) -> str:
        """What the engine loads: a folder or a hub id. A built-in model is in the folder of its
        package.
        """
        if self.source not in BUILTIN_MODELS:
            return self.source
        package, folder = BUILTIN_MODELS[self.source]
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise SettingsError(
                f"settings: model.source is '{self.source}', but '{package}' is not installed here"
            )
        return str(Path(spec.submodule_search_locations[0]) / folder)


class OrderSettings(Section):
    """Which waiting request goes next (docs/order-of-work.md)."""

    interactive_share: float = Field(
        0.7,
        gt=0,
        lt=1,
        description="Share of the engines' work, in token cost, that `realtime` and `standard` get "
        "together while `batch` waits too; 0.3 for an offline service",
    )
    ageing_s: float = Field(
        10.0,
        ge=0,
        description="A `standard` request that has waited this long is aged: it may start before "
        "`realtime` requests",
    )
    aged_share: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="Share of the work of `realtime` and `standard` that aged requests get",
    )
    interactive_credit: float = Field(
        4.0,
        ge=0,
        description="How much of its unused share interactive work may catch up before `batch`, "
        "in multiples of what runs at a time",
    )
    tenant_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {},
        description="Weight of a tenant, if it is not 1: of two that wait, one with the weight "
        "4 gets four times the work of one with the weight 1",
    )
    prompt_weight: float = Field(
        1.0, gt=0, description="Cost of a prompt token, by which classes and tenants share the work"
    )
    output_weight: float = Field(
        2.0,
        gt=0,
        description="Cost of an output token, by which classes and tenants share the work",
    )
    short_first_ms_per_cost: float = Field(
        2.0,
        ge=0,
        description="How much later a tenant's request ranks for each unit of its predicted cost "
        "(an output token costs `output_weight`, a prompt token a quarter of `prompt_weight`), so "
        "that short ones go first. 0: the oldest goes first",
    )
    claim_ahead: float = Field(
        4.0,
        ge=0.25,
        le=64,
        description="Requests of each class that an ingress claims before they can start, in "
        "multiples of its share of the slots; tenants share fairly among these",
    )


class QueueSettings(Section):
    """How much may wait in the queue of each class."""

    max_waiting_critical: int = Field(
        100,
        ge=0,
        description="Most waiting requests of the class `critical`; more are refused with 429",
    )
    max_waiting_realtime: int = Field(
        1_000, ge=0, description="Most waiting requests of the class `realtime`"
    )
    max_waiting_standard: int = Field(
        10_000, ge=0, description="Most waiting requests of the class `standard`"
    )
    max_waiting_batch: int = Field(
        100_000, ge=0, description="Most waiting requests of the class `batch`"
    )
    max_waiting_bytes_critical: int = Field(
        64 << 20,
        ge=1,
        description="Most bytes in the bodies of waiting `critical` requests; more are refused "
        "with 429. All classes together get at most half of the memory that requests may use in "
        "Redis",
    )
    max_waiting_bytes_realtime: int = Field(
        256 << 20, ge=1, description="Most bytes in the bodies of waiting `realtime` requests"
    )
    max_waiting_bytes_standard: int = Field(
        1 << 30, ge=1, description="Most bytes in the bodies of waiting `standard` requests"
    )
    max_waiting_bytes_batch: int = Field(
        1 << 30, ge=1, description="Most bytes in the bodies of waiting `batch` requests"
    )
    max_tenant_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of a class's queue, in sequences and bytes, that one tenant may use, "
        "if API keys are required",
    )
    max_engine_deaths: int = Field(
        3,
        ge=1,
        description="A request is given up as poison after this many engines that ran it have died",
    )
    dead_letters: int = Field(
        100,
        ge=0,
        description="Most given-up requests that are kept as dead letters",
    )

    def max_waiting(self, request_class: str) -> int:
        """How many requests of one class may wait."""
        bound: int = getattr(self, f"max_waiting_{request_class}")
        return bound

    def max_waiting_bytes(self, request_class: str) -> int:
        """How many bytes of one class's bodies may wait."""
        bound: int = getattr(self, f"max_waiting_bytes_{request_class}")
        return bound


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


class RoutingSettings(Section):
    """Consistent hashing with bounded loads."""

    load_factor: float = Field(
        1.25,
        gt=1.0,
        description="No replica gets more than this many times the mean number of requests in "
        "flight",
    )
    virtual_nodes: int = Field(128, ge=1, description="Points of each replica on the hash ring")


class TelemetrySettings(Section):
    """Metrics, logs and traces."""

    snapshot_period_s: float = Field(
        2.0, gt=0, description="How often each process writes its metrics to Redis for /metrics"
    )
    page_period_s: float = Field(
        1.0, ge=0, description="How long an ingress caches its /metrics page"
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Level of the service's own log lines"
    )
    log_format: Literal["text", "json"] = Field(
        "text",
        description="`json` writes one object per line",
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
        description="Share of the requests without a `traceparent` that are traced",
    )
