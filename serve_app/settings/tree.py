"""The settings tree: immutable, with units in the names; unknown settings are refused.

The tree is the `args` of the application in a Serve config file (`cluster/*.yaml`). To keep Redis's
password out of that file, set the environment variable `HERMES_REDIS_URL` on the Ray nodes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from serve_app.errors import SettingsError
from serve_app.settings.limits import RequestLimits
from serve_app.settings.presets import PresetName, fill_in
from serve_app.settings.renamed import by_new_names
from serve_app.settings.sections import (
    FORMS,
    NAMESPACE,
    SERVICE,
    AuthSettings,
    EngineSettings,
    IngressSettings,
    JournalSettings,
    ModelSettings,
    OrderSettings,
    QueueSettings,
    RedisSettings,
    RoutingSettings,
    Section,
    TelemetrySettings,
    WorkerSettings,
)
from serve_app.settings.vllm_names import argument_problem, variables_problem


class Settings(Section):
    """The whole tree."""

    namespace: str = Field("hermes", min_length=1, pattern=NAMESPACE)
    """Prefix of every Redis key; not Kubernetes' namespace"""
    service: str = Field("", max_length=1024, pattern=SERVICE)
    """Name of this service. A namespace belongs to one service: an ingress of another name is not
    let in, and says so in `/readyz`. Empty: not compared"""
    preset: PresetName | None = None
    """Sizes of the engine's batches, where nothing else sets them: `latency`, `balanced` or
    `throughput`; the table of presets has the values"""
    redis: RedisSettings = RedisSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    workers: WorkerSettings = WorkerSettings()
    ingress: IngressSettings = IngressSettings()
    limits: RequestLimits = RequestLimits()
    auth: AuthSettings = AuthSettings()
    queue: QueueSettings = QueueSettings()
    order: OrderSettings = OrderSettings()
    journal: JournalSettings = JournalSettings()
    routing: RoutingSettings = RoutingSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @model_validator(mode="before")
    @classmethod
    def _filled_in(cls, args: Any) -> Any:
        return fill_in(by_new_names(args)) if isinstance(args, Mapping) else args

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.engine.kind == "vllm":
            for name, value in self.engine.args.items():
                if problem := argument_problem(name, value):
                    raise ValueError(f"engine.args.{name} {problem}")
        if (
            self.workers.device == "gpu"
            and 0 < self.workers.gpus < self.workers.tensor_parallel_size
        ):
            raise ValueError(
                f"workers.gpus_per_replica ({self.workers.gpus:g}) is below "
                f"workers.tensor_parallel_size ({self.workers.tensor_parallel_size}): give one GPU "
                "to each rank"
            )
        return self


def load_settings(args: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Settings:
    """Validate `args` (the `args` of the application in a Serve config file) and freeze them.

    If the environment variables `HERMES_REDIS_URL` and `HERMES_KEYS_FILE` are set, they replace
    `redis.url` and `auth.keys_file`.

    Raises:
        SettingsError: names each mistake with its setting.
    """
    try:
        settings = Settings.model_validate(dict(args) if isinstance(args, Mapping) else args)
    except ValidationError as error:
        raise SettingsError("; ".join(_explain(item) for item in error.errors())) from None
    if settings.engine.kind == "vllm" and (wrong := variables_problem(environment)):
        raise SettingsError(f"settings: {wrong}")
    if url := environment.get("HERMES_REDIS_URL"):
        try:
            redis = RedisSettings.model_validate({**settings.redis.model_dump(), "url": url})
        except ValidationError as error:  # its own message would show the URL with a password
            raise SettingsError(
                f"settings: HERMES_REDIS_URL: {_reason(error.errors()[0])}"
            ) from None
        settings = settings.model_copy(update={"redis": redis})
    if keys_file := environment.get("HERMES_KEYS_FILE"):
        auth = settings.auth.model_copy(update={"keys_file": keys_file})
        settings = settings.model_copy(update={"auth": auth})
    if settings.auth.required and not settings.auth.keys_file:
        raise SettingsError(
            "settings: 'auth.keys_file' is empty while auth.required is true: name the file of "
            "API keys (hermes-serve api-key makes them), or set HERMES_KEYS_FILE in the "
            "environment of the Ray nodes"
        )
    return settings


def _explain(item: Any) -> str:
    """A mistake as pydantic says it, with its setting; without its value, which may be secret."""
    path = ".".join(map(str, item["loc"]))
    if item["type"] == "string_pattern_mismatch":
        return f"settings: '{path}' {FORMS[item['ctx']['pattern']]}"
    return f"settings: '{path}': {_reason(item)}" if path else f"settings: {_reason(item)}"


def _reason(item: Any) -> str:
    return str(item["msg"]).removeprefix("Value error, ")
