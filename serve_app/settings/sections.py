"""The sections of the settings tree. The docstring of a setting is also its row in docs/settings.md
(`scripts/pages.py`) and its description in the chart's schema (`helm/schema.py`).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from serve_app.errors import SettingsError
from serve_app.redaction import hide
from serve_app.settings.redis_address import RedisAddress, redis_address

NAMESPACE = r"^[A-Za-z0-9_.-]+$"
SERVICE = r"^[^\p{Z}\p{Cc}\p{Cf}]*$"
RESOURCE = r"^[A-Za-z0-9_]*$"
MODEL_NAME = r"^[^\p{Z}\p{Cc}\p{Cf}:]+$"
MODEL_ALIAS = r"^[^\p{Z}\p{Cc}\p{Cf}?\[\]]+$"
MODEL_SOURCE = r"^(/[^\p{Cc}]*|(s3|gs|az)://[^\p{Z}\p{Cc}]+|[^./~\p{Z}\p{Cc}][^/\p{Z}\p{Cc}]*(/[^/\p{Z}\p{Cc}]+)?)$"
HEADER = r"^[a-z0-9-]{0,64}$"
ENDPOINT = r"^(https?://[^\p{Z}\p{Cc}]+)?$"
STORAGE = r"^(/[^\p{Cc}]*|s3://[^\p{Z}\p{Cc}]+)?$"
ORIGIN = r"^(\*|https?://[^/\p{Z}\p{Cc}]+)$"
SECRET = r"^(env:[A-Za-z_][A-Za-z0-9_]*|file:/[^\p{Cc}]*)?$"
HOST = r"^(\*\.)?[a-z0-9.-]+$"

MODEL_NAME_CHARS = 128

LARGEST = 2**53
"""Up to here every number of YAML and JSON is exact; the chart's YAML has no larger ones."""

FORMS = {
    NAMESPACE: "takes letters, digits, '_', '.' and '-'",
    SERVICE: "takes no spaces",
    RESOURCE: "takes letters, digits and '_'",
    MODEL_NAME: "takes no spaces and no ':'",
    MODEL_ALIAS: "takes no spaces, and none of '?', '[' and ']'",
    MODEL_SOURCE: "takes a folder by its full path, a hub id (organisation/model, no URL) or "
    "builtin:tiny",
    HEADER: "takes the name of a header in lower-case letters, digits and '-'",
    ENDPOINT: "takes a URL such as http://collector:4318/v1/traces",
    STORAGE: "takes a folder by its full path, or s3://bucket/prefix",
    SECRET: "takes env: and the name of an environment variable, or file: and a full path",
    HOST: "takes hosts in lower-case letters, such as hooks.example.com or *.example.com",
    ORIGIN: "takes '*' and origins such as https://chat.example.com",
}
"""What each pattern of the tree means. The chart checks the same patterns, with Go's syntax."""


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
    )

    @model_validator(mode="before")
    @classmethod
    def _in_bounds(cls, given: Any) -> Any:
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


class IngressSettings(Section):
    """The deployment that serves HTTP and dispatches requests."""

    replicas: int = Field(2, ge=1, le=1024)
    """Number of ingresses: HTTP servers that accept requests and dispatch them"""
    cpus_per_replica: float = Field(1, ge=0)
    """CPUs that Ray reserves for each replica"""
    max_replicas_per_node: int | None = Field(None, ge=1)
    """Most ingresses on one node; 1 spreads them over nodes. Default: no limit"""
    ray_resource: str = Field("", pattern=RESOURCE)
    """Custom Ray resource; ingresses run only on nodes that have it. Default: on any node"""
    max_connections: int = Field(4096, ge=1)
    """Most requests that one ingress serves at a time; more are refused with 429"""
    max_body_bytes: int = Field(16 * 1024 * 1024, ge=1024)
    """Largest request body; larger ones are refused with 413"""
    max_buffered_request_bytes: int = Field(512 * 1024 * 1024, ge=1024)
    """Memory of one ingress for request bodies that are being received; more are refused with 429.
    One body always fits"""
    max_header_bytes: int = Field(12 * 1024, ge=1024, le=15 * 1024)
    """Largest request headers in total; HAProxy's own limit is 16 KiB"""
    cors_origins: list[Annotated[str, Field(pattern=ORIGIN)]] = Field([])
    """Origins of web pages that may call the service from a browser, such as
    `https://chat.example.com`; `*` allows all"""
    heartbeat_s: float = Field(8.0, gt=0)
    """Interval of the keepalive events of a stream without output, a second more or less"""
    max_readers: int = Field(1024, ge=1)
    """Most clients that read /v1/requests/{id}/events of one ingress; more are refused with 429"""
    max_buffered_response_bytes: int = Field(256 * 1024 * 1024, ge=1024)
    """Memory of one ingress for answers above 64 KiB that their clients have not read yet; more are
    refused with 429"""
    max_tenant_share: float = Field(0.5, gt=0, le=1)
    """Share of an ingress's `max_connections`, `max_readers`, `max_buffered_request_bytes` and
    `max_buffered_response_bytes` that one tenant may use, if API keys are required"""
    max_bulk_reads: int = Field(4, ge=1)
    """Redis connections of a process for large values (bodies, parts of journals), so that small
    reads do not wait behind them"""
    stalled_client_timeout_s: float = Field(60.0, gt=0)
    """A client that stops reading its answer, or sending its request, for this long is
    disconnected"""
    disconnect_grace_s: float = Field(5.0, ge=0)
    """How long a disconnected client may take to reconnect before its request is cancelled"""
    lost_reader_grace_s: float = Field(90.0, ge=0)
    """How long after its end an answer whose ingress has died waits for its client's retry; 0: no
    retry without an Idempotency-Key joins an earlier request"""
    graceful_shutdown_timeout_s: float = Field(600.0, ge=0)
    """How long an ingress that shuts down waits for its streams to end; after that, clients can
    read on by request id"""
    request_timeout_s: float = Field(600.0, gt=0)
    """Deadline of a request that does not set one"""
    max_request_timeout_s: float = Field(3600.0, gt=0)
    """Longest deadline that x-request-timeout-seconds can set"""
    background_timeout_s: float = Field(86_400.0, gt=0)
    """Default and longest deadline of a request in the background (`Prefer: respond-async`,
    `background: true`)"""

    @model_validator(mode="after")
    def _timeouts(self) -> Self:
        if self.request_timeout_s > self.max_request_timeout_s:
            raise ValueError(
                f"request_timeout_s ({self.request_timeout_s:g}) is above "
                f"max_request_timeout_s ({self.max_request_timeout_s:g})"
            )
        return self


DEFAULT_TENANT = "default"
"""The tenant of every request if no API key is required."""


class AuthSettings(Section):
    """Who may send requests."""

    required: bool = False
    """Whether requests need an API key; /healthz, other probes and /docs do not"""
    keys_file: str = ""
    """File with tenants and the hashes of their API keys, which is read again when it changes"""
    critical_tenants: tuple[str, ...] = Field((), strict=False)  # a list of YAML is no tuple
    """Tenants that may send `critical` requests, which go before all others; `default` is everybody
    if no API key is required"""
    admin_tenants: tuple[str, ...] = Field((), strict=False)
    """Tenants of operators, who read all usage and dead letters; everybody may if no API key is
    required"""
    tenant_header: str = Field("", pattern=HEADER)
    """Header in which a key with the role `gateway` names the tenant of a request. Default: none"""
    class_header: str = Field("", pattern=HEADER)
    """Header in which such a key names the class, as `x-hermes-class` does. Default: none"""


class JournalSettings(Section):
    """How large an answer can be, and how long it can be read."""

    retention_s: float = Field(900.0, gt=0)
    """How long the answer of a request can be read after its end"""
    max_answer_bytes: int = Field(64 << 20, ge=65_536, le=1 << 30)
    """Largest answer in the journal, with its log probabilities; a larger one ends with
    `answer_too_large`"""
    background_retention_s: float = Field(86_400.0, gt=0)
    """How long the answer of a background request, and a stored response or chat completion, can be
    read, unless the request sets another time"""
    store_responses: bool = True
    """Whether a response is stored for `journal.background_retention_s`, where there is room,
    unless it says `store: false`, as OpenAI does"""
    max_retention_s: float = Field(7 * 86_400.0, gt=0)
    """Longest time that x-hermes-retention-seconds can set"""
    max_retained_share: float = Field(0.5, gt=0, le=1)
    """Share of what requests may use in Redis (`redis.max_memory_share`) for answers that are
    retained for later reading; beyond it `Prefer: respond-async` is refused (`results_full`). A
    tenant gets `queue.max_tenant_share` of it"""
    linger_ms: float = Field(50.0, ge=0, le=200)
    """Longest time that a busy worker delays tokens to send several of a stream as one event. Below
    1,000 events a second no token waits; first and last tokens never do. 0: no delay"""
    usage_retention_days: float = Field(100.0, gt=0, le=3650)
    """How long the hourly usage of each tenant, API key, class and model is kept (`GET /v1/usage`):
    some 150 bytes each"""
    listed_requests: int = Field(10_000, ge=0)
    """Latest requests of a tenant that GET /v1/requests lists"""
    transcript_compression_level: int = Field(1, ge=0, le=9)
    """zlib level for finished answers; 0 stores them uncompressed"""


BUILTIN_MODELS = {"builtin:tiny": ("workers", "tiny_model")}
"""Models that ship with the project, as package and folder."""


class ModelSettings(Section):
    """The served model: `name` for clients, `source` for the engine (a path or a hub id)."""

    name: str = Field("hermes-tiny", min_length=1, max_length=MODEL_NAME_CHARS, pattern=MODEL_NAME)
    """Name by which clients request the model"""
    aliases: list[Annotated[str, Field(max_length=MODEL_NAME_CHARS, pattern=MODEL_ALIAS)]] = Field(
        [], max_length=64
    )
    """More names that clients may request it by, and its answers then have; `*` is any text:
    `claude-*`, `gpt-*`, or `*` for every name"""
    source: str = Field("builtin:tiny", pattern=MODEL_SOURCE)
    """Folder or hub id of the model, or `builtin:tiny` for the model that ships with the project"""

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


def no_place(resource: str) -> str:
    """The sentence for a cluster none of whose nodes offers `workers.ray_resource`."""
    return (
        f"no Ray node offers the resource '{resource}' (workers.ray_resource), so no worker could "
        "run: start Ray on the workers' nodes with cluster/ray-start, or with ray start "
        f"--resources '{{\"{resource}\": 1}}', or remove workers.ray_resource"
    )


class EngineSettings(Section):
    """Which engine a worker owns, and its arguments (validated by vLLM, under vLLM's own names)."""

    kind: Literal["vllm", "simulated"] = "vllm"
    """`simulated` loads no model: for load tests and dry runs"""
    args: dict[str, Any] = Field(default_factory=dict)
    """The engine's own arguments; see below"""


SEQUENCES_OF_A_GPU = 256
"""As many as vLLM 0.32 runs by default, unless the card is large."""

POLICY = "serve_app.policy.scaling:replicas_wanted"
"""Ray Serve's autoscaling policy."""


class AutoscalingSettings(Section):
    """Ray Serve's autoscaler, which follows what runs and what waits."""

    min_replicas: int = Field(2, ge=1, le=1024)
    """Fewest replicas"""
    max_replicas: int = Field(8, ge=1, le=1024)
    """Most replicas"""
    target_ongoing_requests: float = Field(20, gt=0)
    """Sequences per replica to aim for, running and waiting; fewer where the slots or the KV cache
    of an engine hold fewer"""
    upscale_delay_s: float = Field(30, ge=0)
    """How long the load must be above the target, or anything must wait, before replicas are
    added"""
    downscale_delay_s: float = Field(120, ge=0)
    """How long fewer replicas must be enough, with a fifth of the target to spare, before replicas
    are removed"""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas ({self.min_replicas}) is above max_replicas ({self.max_replicas})"
            )
        return self

    def for_serve(self) -> dict[str, Any]:
        """Serve's `autoscaling_config`."""
        return {**self.model_dump(), "policy": {"policy_function": POLICY}}


class WorkerSettings(Section):
    """The deployment that owns the engines."""

    replicas: int = Field(2, ge=1, le=1024)
    """Number of workers, each with one engine, without autoscaling"""
    autoscaling: AutoscalingSettings | None = None
    tensor_parallel_size: int = Field(1, ge=1, le=64)
    """GPUs of one engine (on CPUs: processes), as vLLM's argument of this name"""
    cpus_per_replica: float = Field(1, ge=0)
    """CPUs that Ray reserves for each replica"""
    gpus_per_replica: float | None = Field(None, ge=0)
    """GPUs that Ray reserves for each replica. Default: tensor_parallel_size on GPUs, otherwise
    0"""
    device: Literal["cpu", "gpu"] = "cpu"
    """Whether engines run on CPUs or on GPUs"""
    ray_resource: str = Field("", pattern=RESOURCE)
    """Custom Ray resource; workers run only on nodes that have it. Default: on any node that has
    the CPUs and GPUs"""
    max_running_requests: int = Field(128, ge=1, le=65_536)
    """Most sequences that one engine runs at a time; others wait in the queue. With `device: gpu`
    the default is 256, as vLLM's own; for a card of 70 GiB or more vLLM's is 1024"""
    health_check_period_s: float = Field(5.0, gt=0)
    """How often Ray Serve checks a worker's health"""
    health_check_timeout_s: float = Field(30.0, gt=0)
    """Ray Serve replaces a worker that does not answer for this long"""
    graceful_shutdown_timeout_s: float = Field(20.0, ge=0)
    """How long a worker that shuts down may take before it is killed"""
    max_event_loop_block_s: float = Field(1.0, ge=0.1)
    """Most CPU time in which one step of a request may block a worker's event loop; beyond it the
    request ends with `event_loop_blocked`"""
    engine_stall_timeout_s: float = Field(6.0, gt=0)
    """An engine that makes no step for this long while requests run is replaced"""
    max_regenerated_tokens: int = Field(8_192, ge=0)
    """Most tokens that are generated again after an engine died, to resume a request with a `seed`;
    a longer answer ends with `attempt_lost`"""

    @model_validator(mode="before")
    @classmethod
    def _for_the_device(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("device") == "gpu":
            return {"max_running_requests": SEQUENCES_OF_A_GPU, **given}
        return given

    @property
    def wanted(self) -> int:
        return self.replicas if self.autoscaling is None else self.autoscaling.min_replicas

    @property
    def gpus(self) -> float:
        if self.gpus_per_replica is not None:
            return self.gpus_per_replica
        return float(self.tensor_parallel_size) if self.device == "gpu" else 0.0


class OrderSettings(Section):
    """Which waiting request goes next (docs/order-of-work.md)."""

    interactive_share: float = Field(0.7, gt=0, lt=1)
    """Share of the engines' work, in token cost, that `realtime` and `standard` get together while
    `batch` waits too; 0.3 for an offline service"""
    ageing_s: float = Field(10.0, ge=0)
    """A `standard` request that has waited this long is aged: it may start before `realtime`
    requests"""
    aged_share: float = Field(0.1, gt=0, lt=1)
    """Share of the work of `realtime` and `standard` that aged requests get"""
    interactive_credit: float = Field(4.0, ge=0)
    """How much of its unused share interactive work may catch up before `batch`, in multiples of
    what runs at a time"""
    tenant_weights: dict[str, Annotated[float, Field(gt=0)]] = Field({})
    """Weight of a tenant, if it is not 1: of two that wait, one with the weight 4 gets four times
    the work of one with the weight 1"""
    prompt_weight: float = Field(1.0, gt=0)
    """Cost of a prompt token, by which classes and tenants share the work"""
    output_weight: float = Field(2.0, gt=0)
    """Cost of an output token, by which classes and tenants share the work"""
    short_first_ms_per_cost: float = Field(2.0, ge=0)
    """How much later a tenant's request ranks for each unit of its predicted cost (an output token
    costs `output_weight`, a prompt token a quarter of `prompt_weight`), so that short ones go
    first. 0: the oldest goes first"""
    claim_ahead: float = Field(4.0, ge=0.25, le=64)
    """Requests of each class that an ingress claims before they can start, in multiples of its
    share of the slots; tenants share fairly among these"""


class QueueSettings(Section):
    """How much may wait in the queue of each class."""

    max_waiting_critical: int = Field(100, ge=0)
    """Most waiting requests of the class `critical`; more are refused with 429"""
    max_waiting_realtime: int = Field(1_000, ge=0)
    """Most waiting requests of the class `realtime`"""
    max_waiting_standard: int = Field(10_000, ge=0)
    """Most waiting requests of the class `standard`"""
    max_waiting_batch: int = Field(100_000, ge=0)
    """Most waiting requests of the class `batch`"""
    max_waiting_bytes_critical: int = Field(64 << 20, ge=1)
    """Most bytes in the bodies of waiting `critical` requests; more are refused with 429. All
    classes together get at most half of the memory that requests may use in Redis"""
    max_waiting_bytes_realtime: int = Field(256 << 20, ge=1)
    """Most bytes in the bodies of waiting `realtime` requests"""
    max_waiting_bytes_standard: int = Field(1 << 30, ge=1)
    """Most bytes in the bodies of waiting `standard` requests"""
    max_waiting_bytes_batch: int = Field(1 << 30, ge=1)
    """Most bytes in the bodies of waiting `batch` requests"""
    max_tenant_share: float = Field(0.5, gt=0, le=1)
    """Share of a class's queue, in sequences and bytes, that one tenant may use, if API keys are
    required"""
    async_above_s: float = Field(0.0, ge=0)
    """Estimated wait above which the new requests of a class become background work, if they allow
    it, or are refused (`overloaded`). 0: never"""
    max_engine_deaths: int = Field(3, ge=1)
    """A request is given up as poison after this many engines that ran it have died"""
    dead_letters: int = Field(100, ge=0)
    """Most given-up requests that are kept as dead letters"""

    def max_waiting(self, request_class: str) -> int:
        """Of one class."""
        return int(getattr(self, f"max_waiting_{request_class}"))

    def max_waiting_bytes(self, request_class: str) -> int:
        """In the bodies of one class."""
        return int(getattr(self, f"max_waiting_bytes_{request_class}"))


class RedisSettings(Section):
    """The Redis that holds the journal and the queue."""

    url: str = Field("redis://127.0.0.1:6380/0", repr=False)  # it may hold a password
    """redis://, rediss:// (TLS), unix:// or redis[s]+sentinel://"""
    ca_file: str = ""
    """For rediss://: CA certificates to trust instead of the system's"""
    connect_timeout_s: float = Field(1.0, gt=0)
    """Redis counts as unreachable if a connection takes longer"""
    response_timeout_s: float = Field(5.0, gt=0)
    """A connection is dropped if an answer takes longer"""
    admission_timeout_s: float = Field(2.0, gt=0)
    """The client gets 503 if accepting its request takes longer"""
    max_memory_share: float = Field(0.8, gt=0, le=1)
    """Share of Redis's `maxmemory` above which new requests are refused, so that accepted ones can
    always end"""

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


class FilesSettings(Section):
    """Uploaded files, and the outputs of batches."""

    storage: str = Field("", pattern=STORAGE)
    """Where files are kept, below a folder of the namespace's name: a folder that all ingresses
    share, by its full path, or `s3://bucket/prefix`, with AWS's environment variables; empty:
    nowhere, and files and batches are refused with 501"""
    max_bytes: int = Field(512 << 20, ge=1024)
    """Largest file; larger ones are refused with 413"""
    max_uploads: int = Field(16, ge=1)
    """Most uploads of files that one ingress receives at a time; more are refused with 429. Each
    takes some 20 MiB"""
    bytes_per_tenant: int = Field(10 << 30, ge=1024)
    """Most bytes of all files of a tenant; more are refused with 429"""
    files_per_tenant: int = Field(10_000, ge=1)
    """Most files of a tenant"""
    batch_retention_days: float = Field(30.0, gt=0, le=3650)
    """How long input and output files of batches are kept, unless they say so; other files stay
    until they are deleted"""


class BatchSettings(Section):
    """Files of requests that are worked on without a client (`/v1/batches`)."""

    max_in_flight: int = Field(4_096, ge=1, le=65_536)
    """Most lines of all batches of a model that wait or run at a time; normally as many as two
    times what the engines run"""
    max_open_per_tenant: int = Field(100, ge=1, le=10_000)
    """Most batches of a tenant that are not over; more are refused with 429"""
    retention_days: float = Field(30.0, gt=0, le=3650)
    """How long a batch can be read after its end; `files.batch_retention_days` is for its files"""


class RoutingSettings(Section):
    """Consistent hashing with bounded loads."""

    load_factor: float = Field(1.25, gt=1.0)
    """No replica gets more than this many times the mean number of requests in flight"""
    virtual_nodes: int = Field(128, ge=1)
    """Points of each replica on the hash ring"""


class TelemetrySettings(Section):
    """Metrics, logs and traces."""

    snapshot_period_s: float = Field(2.0, gt=0)
    """How often each process writes its metrics to Redis for /metrics"""
    page_period_s: float = Field(1.0, ge=0)
    """How long an ingress caches its /metrics page"""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Level of the service's own log lines"""
    log_format: Literal["text", "json"] = "text"
    """`json` writes one object per line"""
    traces_endpoint: str = Field("", pattern=ENDPOINT)
    """OTLP over HTTP, such as http://collector:4318/v1/traces; empty disables traces"""
    traces_sample_ratio: float = Field(1.0, ge=0, le=1)
    """Share of the requests without a `traceparent` that are traced"""
