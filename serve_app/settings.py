"""Every setting of the application: one frozen tree, units in the names, unknown keys refused.

The tree is the `args` of the application in a Serve config file (`cluster/*.yaml`). Secrets never stand
in it: the Redis URL may come from the environment variable `HERMES_REDIS_URL` of the Ray nodes instead.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from serve_app.door_settings import IngressSettings, QueueSettings
from serve_app.errors import SettingsError
from serve_app.redis_address import SCHEMES, sentinel_address
from serve_app.request_limits import RequestLimits
from serve_app.section import Section

BUILTIN_MODELS = {"builtin:tiny": ("workers", "tiny_model")}
"""Models that ship with the project, as package and folder."""

DEFAULT_TENANT = "default"
"""Of everybody, where no key is required."""


class RedisSettings(Section):
    """Where the journal and the queue live."""

    url: str = Field("redis://127.0.0.1:6380/0", description="redis://, rediss:// (TLS), unix://, redis+sentinel://")
    ca_file: str = Field("", description="rediss://: certificates to trust in place of the system's")
    connect_timeout_s: float = Field(1.0, gt=0, description="after which Redis counts as unreachable")
    response_timeout_s: float = Field(5.0, gt=0, description="silence after which a connection is dropped")
    admission_timeout_s: float = Field(2.0, gt=0, description="to accept a request; after it the client gets 503")
    max_memory_share: float = Field(
        0.8, gt=0, le=1, description="of Redis's `maxmemory`; above it requests are refused, so that endings always fit"
    )

    @field_validator("url")
    @classmethod
    def _known_scheme(cls, url: str) -> str:
        if not url.startswith(SCHEMES):
            raise ValueError("must start with redis://, rediss:// (TLS), unix:// or redis[s]+sentinel://")
        sentinel_address(url)
        return url


class ModelSettings(Section):
    """The model that is served: `name` for clients, `source` for the engine (a path or a hub id)."""

    name: str = Field(
        "hermes-tiny", min_length=1, max_length=128, pattern=r"^[^\s:]+$", description="what clients call the model"
    )
    source: str = Field("builtin:tiny", description="a folder, a hub id, or the model that ships with the project")

    @property
    def path(self) -> str:
        """What the engine loads: a folder or a hub id. A model of ours lies where its package was unpacked."""
        if self.source not in BUILTIN_MODELS:
            return self.source
        package, folder = BUILTIN_MODELS[self.source]
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise SettingsError(f"settings: model.source is '{self.source}', but '{package}' is not installed here")
        return str(Path(spec.submodule_search_locations[0]) / folder)


class EngineSettings(Section):
    """Which engine a worker owns, and its arguments (vLLM's own names, checked against vLLM's own)."""

    kind: Literal["vllm", "simulated"] = Field("vllm", description="`simulated`: no model; for load tests and dry runs")
    args: dict[str, Any] = Field(default_factory=dict, description="the engine's own arguments; see below")


class AutoscalingSettings(Section):
    """Replica counts that follow the load (Ray Serve's autoscaler, on ongoing requests per replica)."""

    min_replicas: int = Field(2, ge=1, description="never fewer")
    max_replicas: int = Field(8, ge=1, description="never more")
    target_ongoing_requests: float = Field(20, gt=0, description="of one replica, on average")
    upscale_delay_s: float = Field(30, ge=0, description="of load above the target before replicas are added")
    downscale_delay_s: float = Field(120, ge=0, description="of load below the target before replicas go")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas ({self.min_replicas}) is above max_replicas ({self.max_replicas})")
        return self


class WorkerSettings(Section):
    """The deployment that owns the engines."""

    replicas: int = Field(2, ge=1, le=1024, description="engines, where there is no autoscaling")
    autoscaling: AutoscalingSettings | None = None
    tensor_parallel_size: int = Field(1, ge=1, le=64, description="GPUs (processes on a CPU) of one engine")
    cpus_per_replica: float = Field(1, ge=0, description="that Ray reserves")
    gpus_per_replica: float | None = Field(None, ge=0, description="default: tensor_parallel_size on GPUs, else 0")
    device: Literal["cpu", "gpu"] = Field("cpu", description="what the engines run on")
    max_running_requests: int = Field(128, ge=1, le=65_536, description="what one engine may hold at a time")
    health_check_period_s: float = Field(5.0, gt=0, description="how often Ray Serve asks a worker for its health")
    health_check_timeout_s: float = Field(30.0, gt=0, description="silence after which a worker is replaced")
    graceful_shutdown_timeout_s: float = Field(20.0, ge=0, description="to finish, before a leaving worker is killed")
    held_s: float = Field(1.0, ge=0.1, description="of a worker's event loop (CPU time), for one step of a request")
    stall_s: float = Field(6.0, gt=0, description="without a step while requests run, before an engine counts as sick")

    @property
    def wanted(self) -> int:
        """Replicas that there should be at least."""
        return self.replicas if self.autoscaling is None else self.autoscaling.min_replicas

    @property
    def gpus(self) -> float:
        """GPUs that Ray reserves for one replica."""
        if self.gpus_per_replica is not None:
            return self.gpus_per_replica
        return float(self.tensor_parallel_size) if self.device == "gpu" else 0.0


class AuthSettings(Section):
    """Who may ask."""

    required: bool = Field(False, description="every request but /healthz and /readyz needs an API key")
    keys_file: str = Field("", description="tenants and the hashes of their keys; read again when it changes")


class JournalSettings(Section):
    """How long a finished request can still be read."""

    retention_s: float = Field(900.0, gt=0, description="how long a request can be read after its end")
    fencing: bool = Field(True, description="off: only to see that `scripts/chaos` finds the damage")
    transcript_compression_level: int = Field(1, ge=0, le=9, description="zlib's; 0 stores it as it is")


class RoutingSettings(Section):
    """Consistent hashing with bounded loads."""

    load_factor: float = Field(1.25, gt=1.0, description="c: no replica above ceil(c * mean) in flight")
    virtual_nodes: int = Field(128, ge=1, description="points of one replica on the ring")


class TelemetrySettings(Section):
    """Metrics, logs and traces."""

    snapshot_period_s: float = Field(2.0, gt=0, description="how often a process leaves its metrics for /metrics")
    page_period_s: float = Field(1.0, ge=0, description="an ingress puts /metrics together this often at most")
    process_port: int = Field(0, ge=0, le=65_000, description="first port for per-process pages; 0: none")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="of our own lines")
    log_format: Literal["text", "json"] = Field("text", description="json: with request_id, tenant, reason as fields")
    traces_endpoint: str = Field(
        "", pattern=r"^(https?://[^\s]+)?$", description="OTLP over HTTP, such as http://collector:4318/v1/traces"
    )
    traces_sample_ratio: float = Field(1.0, ge=0, le=1, description="of the traces that no caller has begun")


class Settings(Section):
    """The whole tree."""

    namespace: str = Field("hermes", pattern=r"^[A-Za-z0-9_.-]+$", description="first part of every Redis key")
    redis: RedisSettings = RedisSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    workers: WorkerSettings = WorkerSettings()
    ingress: IngressSettings = IngressSettings()
    limits: RequestLimits = RequestLimits()
    auth: AuthSettings = AuthSettings()
    queue: QueueSettings = QueueSettings()
    journal: JournalSettings = JournalSettings()
    routing: RoutingSettings = RoutingSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @model_validator(mode="after")
    def _possible(self) -> Self:
        owned = {
            "tensor_parallel_size": "workers.tensor_parallel_size",
            "model": "model.source",
            "served_model_name": "model.name",
            "max_num_seqs": "workers.max_running_requests",
            "allowed_media_domains": "limits.media_domains",
        }
        for key, home in owned.items():
            if key in {name.replace("-", "_") for name in self.engine.args}:
                raise ValueError(f"engine.args.{key} is set by {home}: remove it and set {home}")
        if self.workers.device == "gpu" and 0 < self.workers.gpus < self.workers.tensor_parallel_size:
            raise ValueError(
                f"workers.gpus_per_replica ({self.workers.gpus:g}) is below "
                f"workers.tensor_parallel_size ({self.workers.tensor_parallel_size}): give one GPU to each rank"
            )
        return self


def load_settings(args: Mapping[str, Any]) -> Settings:
    """Check `args` (the `args` of the application in a Serve config file) and freeze them.

    The environment variables `HERMES_REDIS_URL` and `HERMES_KEYS_FILE`, where set, take the place of `redis.url` and
    `auth.keys_file`.

    Raises:
        SettingsError: with one line per mistake, each naming the key and the fix.
    """
    try:
        settings = Settings.model_validate(dict(args))
    except ValidationError as error:
        raise SettingsError("; ".join(_explain(item) for item in error.errors())) from None
    if url := os.environ.get("HERMES_REDIS_URL"):
        try:
            redis = RedisSettings.model_validate({**settings.redis.model_dump(), "url": url})
        except ValidationError as error:  # its own message would show the URL, which may hold a password
            raise SettingsError(f"settings: HERMES_REDIS_URL: {_reason(error.errors()[0])}") from None
        settings = settings.model_copy(update={"redis": redis})
    if keys_file := os.environ.get("HERMES_KEYS_FILE"):
        auth = settings.auth.model_copy(update={"keys_file": keys_file})
        settings = settings.model_copy(update={"auth": auth})
    if settings.auth.required and not settings.auth.keys_file:
        raise SettingsError(
            "settings: 'auth.keys_file' is empty while auth.required is true: name the file of API keys "
            "(scripts/api-key makes them), or set HERMES_KEYS_FILE in the environment of the Ray nodes"
        )
    return settings


def _explain(item: Any) -> str:
    """One pydantic error as one sentence: the key, what is wrong, the fix."""
    path = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        known = _known_keys(item["loc"][:-1])
        near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1, cutoff=0.5)
        fix = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}"
        return f"settings: unknown key '{path}': {fix}"
    message = _reason(item)
    if path.endswith(("_s", "_ms", "_bytes")) and item["type"].endswith(("_parsing", "_type")):
        unit = {"s": "seconds", "ms": "milliseconds", "bytes": "bytes"}[path.rsplit("_", 1)[1]]
        return f"settings: '{path}' takes a plain number of {unit}, not {item['input']!r}"
    return f"settings: '{path}': {message}" if path else f"settings: {message}"


def _reason(item: Any) -> str:
    return str(item["msg"]).removeprefix("Value error, ")


def _known_keys(location: tuple[Any, ...]) -> list[str]:
    section: type[BaseModel] = Settings
    for part in location:
        annotation = section.model_fields[str(part)].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        section = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return sorted(section.model_fields)
